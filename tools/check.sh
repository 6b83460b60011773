# Are the tools here that make cannot install itself? Usage: sh check.sh PYTHON
# Says what is missing and what to type, and ends with status 1 if anything is.
python=$1
status=0

missing() { # what, and the packages that hold it in Debian and Ubuntu, Fedora, Arch
    printf 'Missing: %s\n' "$1"
    printf '  Debian, Ubuntu: sudo apt install %s\n' "$2"
    printf '  Fedora:         sudo dnf install %s\n' "$3"
    printf '  Arch:           sudo pacman -S %s\n' "$4"
    status=1
}

release() { # of the interpreter: 3.11
    "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

if ! command -v "$python" >/dev/null; then
    missing "Python 3.11 or newer ($python is not here; PYTHON=... names another)" 'python3 python3-venv' python3 python
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    missing "Python 3.11 or newer ($python is $(release)); once it is here, name it: PYTHON=python3.11" \
        'python3.11 python3.11-venv' python3.11 python
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing "the module venv of $python" "python$(release)-venv" python3 python
fi

compiler=${CXX:-g++}
command -v "$compiler" >/dev/null || missing "$compiler, a C++ compiler (GCC)" g++ gcc-c++ gcc

test $status = 0 || echo 'Then run make again.'
exit $status
