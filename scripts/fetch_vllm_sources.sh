#!/usr/bin/env bash
# fetch_vllm_sources.sh DIR: the Python sources of the CUDA build of vLLM, unpacked into DIR and not installed, for the
# tests of the seams. The wheel (340 MB) stays in pip's cache only.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:?where to unpack}
key=$(sha256sum requirements/vllm-cuda-sources.txt | cut -d' ' -f1)
if [[ -f $target/.complete && $(cat "$target/.complete") == "$key" ]]; then exit 0; fi

mkdir -p "$(dirname "$target")"
partial=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$partial"' EXIT
echo "sources: fetching $(grep -o 'vllm==[^ ]*' requirements/vllm-cuda-sources.txt), 340 MB, only to read its Python sources"
.venv/bin/python -m pip --disable-pip-version-check download --quiet --no-input --no-deps --require-hashes \
    --only-binary :all: --platform manylinux_2_28_x86_64 --dest "$partial/wheel" \
    -r requirements/vllm-cuda-sources.txt
.venv/bin/python - "$partial"/wheel/*.whl "$partial/unpacked" "$key" <<'PYTHON'
import pathlib
import sys
import zipfile

wheel, folder, key = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
    archive.extractall(folder, names)
pathlib.Path(folder, ".complete").write_text(key)
print(f"sources: {len(names)} files")
PYTHON
rm -rf "$target"
mv "$partial/unpacked" "$target"
