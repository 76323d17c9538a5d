// Which operation of a run this is, for a reader of a trace.
#pragma once

#include <cstdint>

namespace pentatron {

struct Label {
  const char* name = nullptr;  // must live as long as the trace
  int64_t step = -1;           // from 0; -1, here and below: none
  int micro_batch = -1, layer = -1;
  char pass = 'o';   // trace.h
  double bytes = 0;  // moved from and to memory, or sent by this rank
};

}  // namespace pentatron
