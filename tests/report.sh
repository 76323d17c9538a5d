#!/usr/bin/env bash
# report.sh: makes the page of make report about few and short runs, and opens it in a browser without a
# window.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/test-report
rm -rf $folder
mkdir -p $folder
python3 common/report/sweep.py $folder/sweep.csv build/host/plan build/cpu-bf16/07_combined_5d 4 --model smollm-1.7b \
  --seq-len 2048 --global-batch-size 64 --dry-run &
python3 common/report/progress.py build/cpu-fp32 $folder/runs 8 3 '01 04-tp-sp 05-1f1b 07-3d 07-experts' > $folder/runs.log 2>&1 ||
  {
    tail $folder/runs.log
    exit 1
  }
wait $!
build/python-report/bin/python common/report/report.py $folder/report.html build '--gpus 16 --seq-len 2048' $folder/runs
build/python-browser/bin/python tests/report.py $folder/report.html build
