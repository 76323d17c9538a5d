// The options of context parallelism.
#pragma once

#include "options/options.h"

namespace pentatron {

// Which tokens of a sequence a rank holds: one block (contiguous), or an early and a late one (zigzag).
enum class CpLayout { contiguous, zigzag };
inline const Names<CpLayout> cp_layout_names = {{"contiguous", CpLayout::contiguous},
                                                {"zigzag", CpLayout::zigzag}};
inline std::string to_string(CpLayout layout) { return name_of(cp_layout_names, layout); }

// What attention exchanges so that queries meet all keys.
enum class CpExchange { ring, all_gather, ulysses, ulysses_ring };
inline const Names<CpExchange> cp_exchange_names = {{"ring", CpExchange::ring},
                                                    {"all-gather", CpExchange::all_gather},
                                                    {"ulysses", CpExchange::ulysses},
                                                    {"ulysses-ring", CpExchange::ulysses_ring}};
inline std::string to_string(CpExchange exchange) { return name_of(cp_exchange_names, exchange); }

struct ContextParallelOptions {
  CpLayout cp_layout = CpLayout::zigzag;
  CpExchange cp_exchange = CpExchange::ring;
  int ulysses = 2;  // ranks that exchange tokens for heads, with ulysses_ring
};

inline void declare(CommandLine& line, const Options&, ContextParallelOptions& o) {
  line.group("Context parallelism");
  line.choice("--cp-layout", o.cp_layout, cp_layout_names,
              "which tokens of a sequence a rank holds: a block, or an early and a late one");
  line.choice("--cp-exchange", o.cp_exchange, cp_exchange_names,
              "keys and values by hops or gathered, tokens for heads, or both in groups");
  line.number("--ulysses", o.ulysses, 2, 1 << 20, "ranks that exchange tokens for heads, with ulysses-ring");
}

}  // namespace pentatron
