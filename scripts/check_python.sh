#!/usr/bin/env bash
# check_python.sh PYTHON: one clear line and exit code 1 unless PYTHON is a Python that the lock covers.
set -euo pipefail

python=${1:?which Python}
die() {
    echo "install: error: $*" >&2
    exit 1
}

command -v "$python" > /dev/null ||
    die "no Python at '$python'; Python 3.11 to 3.14 is needed (make … PYTHON=/path/to/python3.11)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || die "'$python' does not run as a Python"
case $version in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *) die "'$python' is Python $version; Python 3.11 to 3.14 is needed (make … PYTHON=/path/to/python3.11)" ;;
esac
[[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] ||
    die "the locked CPU environment is for Linux on x86_64, this is $(uname -s) on $(uname -m)"
