#!/usr/bin/env bash
# hugging_face.sh BUILDS: runs hugging_face.py with PyTorch and transformers, which it installs: PyTorch as Debian's
# package, because that is without CUDA; the rest into build/python.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
builds=$1 python=/usr/bin/python3 folder=build/python-hf
common/setup.sh cpu torch.py:python3-torch numpy.py:python3-numpy ensurepip.py:python3-venv || exit 1
if [ ! -e $folder/ready ]; then
  rm -rf $folder
  { $python -m venv --system-site-packages $folder &&
    $folder/bin/pip install -q --disable-pip-version-check 'transformers==4.45.2' && touch $folder/ready; } || exit 1
fi
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error exec $folder/bin/python tests/hugging_face.py "$builds"
