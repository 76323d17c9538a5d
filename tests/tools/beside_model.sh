#!/usr/bin/env bash
# beside_model.sh TABLE COMMAND...: runs a command that prints the time of each kernel (--profile), and puts
# beside it what TABLE, the same of a modelled GPU, has: milliseconds, and measured over modelled. TABLE may
# be missing.
set -o pipefail
"${@:2}" | awk -v table="$1" '
  function beside(line, measured, ms) {
    printf "%-80s %12s %9s\n", line, ms == "" ? "-" : ms, (ms > 0 ? sprintf("%.2f", measured / ms) : "-")
  }
  BEGIN {
    while ((getline < table) > 0) {
      if (/^Time by kernel/) in_table = 1
      else if (in_table && $NF == "%" && NF == 6) { modelled[$1] = $3; of_all += $3 }
    }
    in_table = 0
  }
  /^Time by kernel/ { in_table = 1; printf "%-80s %12s %9s\n", $0, "modelled, ms", "measured/"; next }
  in_table && $NF == "%" && NF == 6 { beside($0, $3, modelled[$1]); all += $3; delete modelled[$1]; next }
  { print }
  END {
    for (name in modelled) beside("not measured: " name, 0, modelled[name])
    beside(sprintf("all: %.2f ms", all), all, of_all)
  }'
