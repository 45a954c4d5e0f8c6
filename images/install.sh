#!/bin/sh
# Inside a build: install what a requirements file locks, and our wheel, into /opt/kvferry.
#   install.sh FILE     a file named *-cpu.txt takes torch from $TORCH_INDEX in addition
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
    install --no-deps --index-url "$TORCH_INDEX" --requirement /build/torch.txt
    ;;
esac
install --no-deps --no-index /wheel/*.whl
"$into/bin/python" -P images/finish.py "$into"
