#!/usr/bin/env bash
# hugging_face.sh [BUILDS]: installs PyTorch and transformers, and runs hugging_face.py with these builds.
# PyTorch is Debian's package, because that is without CUDA; the rest is in build/python-hf. Where they can
# not be had, it says "skipped".
set -uo pipefail
cd "$(dirname "$0")/.." || exit
builds=${1:-} folder=build/python-hf
skip() {
  echo "skipped: PyTorch or transformers can not be installed here"
  exit 0
}
common/build/setup.sh cpu torch.py:python3-torch numpy.py:python3-numpy ensurepip.py:python3-venv || skip
if [ ! -e $folder/ready ]; then
  rm -rf $folder
  { /usr/bin/python3 -m venv --system-site-packages $folder &&
    $folder/bin/pip install -q --disable-pip-version-check 'transformers==4.45.2' && touch $folder/ready; } || skip
fi
[ -n "$builds" ] || exit 0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error exec $folder/bin/python tests/hugging_face.py "$builds"
