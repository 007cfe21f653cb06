#!/usr/bin/env bash
# Resolves requirements/cpu.in again into requirements/cpu.lock (exact versions, hashes of every file of each release).
# Versions already in the lock are kept where they still fit; `scripts/lock.sh --upgrade` takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=x86_64-manylinux_2_36
pythons=(3.11 3.12 3.13 3.14)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet uv
# uv takes no certificate file from pip's settings.
if [[ -n "${PIP_CERT:-}" && -z "${SSL_CERT_FILE:-}" ]]; then
    export SSL_CERT_FILE="$PIP_CERT"
fi

for python in "${pythons[@]}"; do
    if [[ -f requirements/cpu.lock ]]; then
        cp requirements/cpu.lock "$work/$python.lock"
    fi
    "$work/venv/bin/uv" pip compile requirements/cpu.in "$@" --quiet --output-file "$work/$python.lock" \
        --override requirements/leave-out.txt --python-version "$python" --python-platform "$platform" \
        --only-binary :all: --generate-hashes --no-header --no-annotate
done

# One lock must do for every Python: if a release differs between them, cpu.in has to name what differs.
for python in "${pythons[@]:1}"; do
    if ! diff <(grep '==' "$work/${pythons[0]}.lock") <(grep '==' "$work/$python.lock"); then
        echo "lock.sh: error: Python ${pythons[0]} and $python need different releases; name them in cpu.in" >&2
        exit 1
    fi
done
{
    echo "# Made by scripts/lock.sh (make lock) from cpu.in and leave-out.txt, for Linux on x86_64 and Python 3.11 to 3.14."
    echo "# pip install --no-deps --require-hashes -r requirements/cpu.lock; torch: see torch-cpu.txt."
    grep -v '^#' "$work/${pythons[0]}.lock"
} > requirements/cpu.lock.new
mv requirements/cpu.lock.new requirements/cpu.lock
echo "requirements/cpu.lock: $(grep -c '==' requirements/cpu.lock) packages"
