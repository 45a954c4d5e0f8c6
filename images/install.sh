#!/bin/sh
# Inside a build: install what a requirements file locks, and our wheel, into /opt/kvferry.
#   install.sh FILE     a file named *-cpu.txt takes torch from $TORCH_INDEX in addition; C++ operators come from
#                       /build/prebuilt, if there are any
set -eu
file=$1
into=/opt/kvferry
python3 -m venv --without-pip "$into"

install() { /build/bin/pip --python "$into/bin/python" install --no-compile --only-binary=:all: "$@"; }

install --require-hashes --requirement "$file"
case $file in
  *-cpu.txt)
    # That index has other files than the one that is locked: the version is held, and TORCH_SHA256 holds the file.
    torch=$(grep '^torch==' images/requirements/torch-cpu.txt)
    echo "$torch${TORCH_SHA256:+ --hash=sha256:$TORCH_SHA256}" >/build/torch.txt
    accepted="accepted: an index with builds without CUDA (https://download.pytorch.org/whl/cpu or a mirror of it)"
    accepted="$accepted, or TORCH=cuda, which takes torch as it is locked"
    install --no-deps --index-url "$TORCH_INDEX" --requirement /build/torch.txt || {
      echo "TORCH=cpu: $torch cannot be had from TORCH_INDEX=$TORCH_INDEX; $accepted" >&2
      exit 1
    }
    # Without its CUDA parts, a build for CUDA would install well and fail when the first pod starts.
    grep -q '^cuda\b.*= None$' "$into"/lib/python3*/site-packages/torch/version.py || {
      echo "TORCH=cpu: TORCH_INDEX=$TORCH_INDEX has a torch that is built for CUDA; $accepted" >&2
      exit 1
    }
    ;;
esac
install --no-deps --no-index /wheel/*.whl
[ ! -d /build/prebuilt ] || cp -R /build/prebuilt "$into"/lib/python3*/site-packages/kvferry_kernels/native/
"$into/bin/python" -P images/finish.py "$into"
