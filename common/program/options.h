// The command line: which model, which data, how the batch is cut, how it is optimised, what is written.
// Every wrong value throws a UsageError, before any memory is allocated or any file is touched. Its one
// line names the option, the value and what would be valid.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "device/errors.h"
#include "model/config.h"
#include "ranks/peers.h"

namespace pentatron {

// --help was given. main() prints what(), the help text, on stdout and ends with status 0.
struct HelpRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// When data-parallel ranks sum their gradients: after backward, unit by unit during it, or in buckets of
// equal size.
enum class DpSync { naive, overlap, bucket };

// The order in which pipeline ranks take their micro-batches.
//   afab         all forward, then all backward
//   one_f_one_b  one forward, one backward
//   interleaved  one forward, one backward, with several model chunks on a rank
//   zb_h1        one forward, one backward, with weight gradients put off to fill the bubble
//   zb_v         the same with two chunks on a rank, the second ones in reverse order
//   dualpipe     two copies of the model, one in reverse order; micro-batches enter at both ends
//   dualpipe_v   two chunks as in zb_v; a forward of one beside a backward of the other
//   from_file    any order, which a file says
enum class PpSchedule { afab, one_f_one_b, interleaved, zb_h1, zb_v, dualpipe, dualpipe_v, from_file };

// How pipeline ranks exchange activations and gradients: on a stream for each kind and direction, or in
// groups on one.
enum class PpMessages { streams, grouped };

// Whether tensor parallelism cuts forward's products into chunks, so that their communication hides.
enum class TpOverlap { none, chunks };

// CpLayout: which tokens of a sequence a context rank holds. It is one block (contiguous), or an early
// and a late one (zigzag). CpExchange: what attention exchanges so that queries meet all keys.
enum class CpLayout { contiguous, zigzag };
enum class CpExchange { ring, all_gather, ulysses, ulysses_ring };

// What keeps the experts equally busy: a loss, a bias of the router's choice, or nothing.
enum class Balance { loss, bias, none };

// How rows get to their experts: each tensor rank sends all its rows, or a share of them.
enum class Dispatch { direct, once };

// Whether the products of a rank's experts are one launch, or one for each expert.
enum class ExpertProducts { grouped, loop };

std::string_view to_string(Recompute recompute);
std::string_view to_string(Attention attention);
std::string_view to_string(OptimizerKind optimizer);
std::string_view to_string(DpSync sync);
std::string_view to_string(TpOverlap overlap);
std::string_view to_string(PpSchedule schedule);
std::string_view to_string(PpMessages messages);
std::string_view to_string(CpLayout layout);
std::string_view to_string(CpExchange exchange);
std::string_view to_string(Balance balance);
std::string_view to_string(Dispatch dispatch);
std::string_view to_string(ExpertProducts products);

// Defaults that depend on the model (its sizes, sequence_length, lr) or on another option are set by
// parse_options.
struct Options : TrainingConfig, CommunicationConfig {
  std::string data;  // path; common/corpus.txt unless given

  DpSync dp_sync = DpSync::bucket;
  double bucket_mb = 25;  // megabytes (10^6 bytes) of a bucket
  int zero_stage = 1;
  bool sequence_parallel = false;  // tensor ranks also split the rows outside their regions
  bool fp8_communication = false;  // what these ranks gather for products is sent in fp8
  TpOverlap tp_overlap = TpOverlap::none;
  int tp_chunks = 2;  // of --tp-overlap chunks
  PpSchedule pp_schedule = PpSchedule::one_f_one_b;
  std::string pp_schedule_file;  // path, with from_file
  std::string pp_schedule_text;  // all that is in this file
  std::vector<double> pp_costs;  // forward, input gradient, weight gradient, transfer; empty: not given
  int pp_max_in_flight = 0;      // micro-batches that a rank may keep, over its chunks; 0: any number
  PpMessages pp_messages = PpMessages::streams;
  int vpp = 0;                    // model chunks on a pipeline rank
  int pp = 0;                     // pipeline ranks; 0: all (in 07: one)
  bool show_schedule = false;     // draw the schedule, and train nothing
  std::string show_schedule_svg;  // path; empty: no picture of it
  CpLayout cp_layout = CpLayout::zigzag;
  CpExchange cp_exchange = CpExchange::ring;
  int ulysses = 2;         // ranks that exchange tokens for heads, with ulysses_ring
  int tp = 1, cp = 1;      // tensor and context ranks
  int dp = 0;              // data ranks; 0: what the other axes leave
  bool show_mesh = false;  // print each rank's place, and train nothing

  int experts = 0;    // experts of a layer that has any; 0: no layer has
  int top_k = 2;      // experts that each token is sent to
  int moe_every = 1;  // every moe_every-th layer has experts
  int ep = 1;         // ranks that share out the experts
  Balance balance = Balance::loss;
  double aux_loss = 0.01;      // weight of the loss that balances the experts
  double balance_rate = 1e-3;  // by which the bias of an expert moves in a step
  double expert_buffer = 0;    // rows of an expert rank's buffer, over its even share; 0: for all cases
  int shared_experts = 0;      // further experts of such a layer, which every token is sent to
  double drop_tokens = 0;      // rows that an expert takes, over an even share; 0: all
  double z_loss = 0;           // weight of the loss that keeps the router's logits small
  int expert_chunks = 1;       // of a micro-batch that travel to the experts by themselves
  Dispatch dispatch = Dispatch::direct;
  ExpertProducts expert_products = ExpertProducts::grouped;
  bool has_experts(int layer) const { return experts > 0 && (layer + 1) % moe_every == 0; }
  bool has_balance_bias() const { return experts > 0 && balance == Balance::bias; }

  int64_t max_bytes = 16 << 20;  // the largest message of the primer of the collectives

  // Checkpoints (checkpoint.h). Paths; empty: none.
  std::string save, load, load_weights;
  std::string load_folder;  // of the checkpoint, or of the weights
  int save_every = 0;       // steps between two checkpoints; 0: only at the end
  int keep = 2;             // of them

  std::string log_json;  // path; empty: no log
  std::string trace;     // path; empty: no trace
  bool profile = false;  // print the time of each kernel at the end
  int trace_steps = 0;   // the last steps, which trace and profile are about; 0: all
  int log_every = 10;    // steps between two printed lines
  int sample = 0;        // tokens of text that the trained model writes at the end

  std::string as_json;  // all options of the program with their values, as a JSON object
};

// Elements of all parameters (embedding and head are two matrices), and of those that one token uses: of
// a layer's experts only top_k.
int64_t parameter_count(const Options& options);
int64_t active_parameter_count(const Options& options);

struct TrainerState;  // checkpoint_folder.h
// What --load continues with other options of the training: "; --lr is 0.1 and was 0.2", or nothing.
std::string changed_options(const Options& options, const TrainerState& state);

// The groups of options that only some programs take.
enum class OptionGroup {
  communication,
  data_parallel,
  zero,
  tensor_parallel,
  pipeline,
  context_parallel,
  experts,
  mesh
};

// The default of --attention (program.cu). In a CPU build it is `on_cpu`. On a GPU it is tensor-core, if
// build, GPU and head size can; but where a small block computed both ways differs, one line says so. Else
// tiled.
Attention default_attention(const ModelConfig& model, Attention on_cpu);

// Throws UsageError or HelpRequest. `groups`: what the program takes beside the options of all programs;
// `attention`: its default for --attention in a CPU build.
Options parse_options(int argc, const char* const* argv, std::string_view description,
                      std::initializer_list<OptionGroup> groups = {}, Attention attention = Attention::naive);

// For the primer of the collectives, which trains nothing: options of the device, of communication, and
// --max-bytes.
Options parse_primer_options(int argc, const char* const* argv, std::string_view description);

}  // namespace pentatron
