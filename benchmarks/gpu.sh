#!/usr/bin/env bash
# What coalesce does on one GPU, in less than eight minutes, without a network. `--help` says how.
# Here stands what comes before Python: the interpreter and its packages. The rest is `python -m benchmarks.gpu`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

needed() { # needed: the packages that must be there
    sed '/^# peers/,$d; /^#/d' "$root/benchmarks/wheels.txt"
}

usage() {
    cat <<END
Usage: benchmarks/gpu.sh [--out FOLDER] [--wheels FOLDER] [--device cuda|cpu] [--quick] [--python PYTHON]

Measures mlp, gpt and cnn on one GPU: plain PyTorch (eager, compiled, reduce-overhead; 1 to 6 processes), coalesced, the
floor, jax and modelbatch where they are installed, other numbers of lanes, TF32, bfloat16, the step as a CUDA graph; then
coalesce.memory --size blog, and the seconds to compile. The device's own settings stay as they are.

  --out FOLDER     an empty or a new folder for the results; gpu-results by default. A JSON file and a log of each part,
                   and summary.json
  --wheels FOLDER  wheels of packages that the machine lacks; they go into a virtual environment for this once
  --device DEVICE  cuda by default
  --quick          the smallest sizes, nothing compiled: to see that all of it runs; with --device cpu in three minutes
  --python PYTHON  an interpreter that has torch; python3 by default

A part that fails, or is not done in its time, is reported, the others go on, and the exit code is 1 at the end.

Needed beside torch, numpy, pandas, pyarrow, safetensors and rich:

$(needed | tr '\n' ' ' | fold -s -w 116 | sed 's/^/  /')

This makes the folder, for Python 3.12, modelbatch included; what the machine has need not lie there:

  pip wheel --no-deps -w wheels -c constraints.txt antlr4-python3-runtime
  pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
      --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 \\
      -d wheels --find-links wheels -c constraints.txt -r benchmarks/wheels.txt
END
}

refuse() { # refuse WORDS: the command makes no sense
    echo "benchmarks/gpu.sh: $*; see --help" >&2
    exit 2
}

wheels="" python=python3 device=cuda out=gpu-results quick=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit ;;
        --quick) quick=(--quick) && shift ;;
        --out | --wheels | --device | --python)
            (($# > 1)) || refuse "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        *) refuse "unknown argument $1 (known: --out, --wheels, --device, --quick, --python, --help)" ;;
    esac
done
[[ $device == cuda || $device == cpu ]] || refuse "--device $device: must be cuda or cpu"
[[ -z $wheels || -d $wheels ]] || refuse "--wheels $wheels: is no folder"
[[ ! -e $out || -d $out && -z $(ls -A "$out") ]] || refuse "--out $out: must be an empty or a new folder"
command -v "$python" >/dev/null || refuse "--python $python: is no command"

install() { # install FOLDER: make a virtual environment that has this interpreter's packages, and the wheels besides
    local own
    "$python" -m venv --without-pip --system-site-packages "$1"
    own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # the "system's" packages are not those of a virtual environment that the interpreter may be of
    "$python" -c 'import site; print(*(f"import site; site.addsitedir({p!r})" for p in site.getsitepackages()), sep="\n")' \
        >"$own/outer.pth"
    "$1/bin/python" -m pip --version >/dev/null 2>&1 || "$1/bin/python" -m ensurepip
    # by name: pip leaves alone what is there
    find "$wheels" -name '*.whl' -printf '%f\n' | sed 's/-.*//' | sort -u |
        xargs "$1/bin/python" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels"
}

lacking() { # lacking: what cannot be imported, of what the parts import
    "$python" -W ignore - <<'END'
from importlib import import_module

needed = "torch numpy pandas pyarrow safetensors rich hydra omegaconf filelock psutil sklearn.datasets mnist1d.data"
for name in needed.split():
    try:
        import_module(name)
    except ImportError as error:
        print(error.name or name)
END
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ -n $wheels ]]; then
    install "$work/venv"
    python=$work/venv/bin/python
fi
missing=$(lacking | sort -u | xargs)
[[ -z $missing ]] || refuse "$python lacks $missing"

export PYTHONPATH=$root
"$python" -m benchmarks.gpu --device "$device" "${quick[@]}" --spent "$SECONDS" "$out" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' INT TERM
rc=0
wait "$child" || rc=$?
# a signal ends the waiting, not the child
wait "$child" || rc=$?
exit "$rc"
