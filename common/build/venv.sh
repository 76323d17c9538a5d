#!/usr/bin/env bash
# venv.sh NAME: makes build/python-NAME, a virtual environment with the packages of this name.
set -euo pipefail
cd "$(dirname "$0")/../.."
drawings=(altair==6.3.0 vl-convert-python==1.9.0.post1) commands=(ensurepip.py:python3-venv)
case $1 in
  format) packages=(clang-format==14.0.6 ruff==0.17.6 shfmt-py==4.2.0) ;;
  report) packages=("${drawings[@]}") ;;
  book) packages=(mkdocs-material==9.8.2 siwei-pymath==1.0.1 mini-racer==0.14.1 "${drawings[@]}") ;; # MathJax, and V8 for it
  precisions) packages=("${drawings[@]}" numpy==2.2.6 safetensors==0.6.2) ;;
  browser) packages=(playwright==1.65.2) commands+=(chromium:chromium) ;;
  tokens) packages=(tokenizers) ;;
  *)
    echo "venv.sh: $1 is not valid; expected a name that is in it" >&2
    exit 2
    ;;
esac
folder=build/python-$1
[ "$(cat "$folder/ready" 2> /dev/null)" != "${packages[*]}" ] || exec touch "$folder/ready"
common/build/setup.sh cpu "${commands[@]}"
rm -rf "$folder"
mkdir -p build
/usr/bin/python3 -m venv "$folder"
"$folder/bin/pip" install -q --disable-pip-version-check "${packages[@]}"
echo "${packages[*]}" > "$folder/ready"
