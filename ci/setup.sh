# Sourced by ci/fuzz and ci/test: makes .venv on first use, then only activates it.
# An extra (test, lint, ..) is installed when first asked for. PYTHON chooses the interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "kdafuzz needs Python 3.11 or newer on PATH (or in PYTHON); found none" >&2
  exit 2
}

# set_up EXTRAS: a stamp names what is installed, so an edited requirement installs again.
set_up() {
  local extras=$1 stamp
  stamp=.venv/.kdafuzz-$extras-$(cat pyproject.toml ci/constraints.txt | cksum | tr -d ' ')
  if [ ! -f "$stamp" ]; then
    echo "setting up .venv (first use: a minute or two)" >&2
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
      --constraint ci/constraints.txt --editable ".[$extras]"
    touch "$stamp"
  fi
  export PATH="$root/.venv/bin:$PATH"
}
