#!/bin/sh
# What the build needs from the system, which pip cannot bring. What is missing is installed where
# that needs no question (apt-get, as root or with a sudo that asks for no password); elsewhere the
# command that does it is printed, and the status is 1.
#
#   sh tools/check_system.sh build PYTHON    Python >= 3.10, venv, Python.h, a C++ compiler, git
#   sh tools/check_system.sh tests PYTHON    GoogleTest
set -u
purpose=$1
python=$2
missing="" packages=""

need() { # WHAT PACKAGE
  missing="$missing
  - $1"
  packages="$packages $2"
}

stop() {
  echo "trae_mem: $1" >&2
  exit 1
}

check_build() {
  if command -v "$python" >/dev/null 2>&1; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
      stop "$python does not start."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      stop "$python is Python $version; 3.10 or newer is needed. Name one: make PYTHON=python3.12 …"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      need "$python -m venv" "python$version-venv"
    "$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
      need "Python.h of Python $version" "python$version-dev"
  else
    need "Python 3.10 or newer ($python)" "python3 python3-venv python3-dev"
  fi
  if [ -n "${CXX:-}" ]; then
    # Unquoted: CXX may be a command with arguments, such as "ccache g++".
    # shellcheck disable=SC2086
    command -v $CXX >/dev/null 2>&1 || stop "CXX=$CXX: there is no such compiler."
  elif ! command -v g++ >/dev/null 2>&1 && ! command -v clang++ >/dev/null 2>&1; then
    need "a C++20 compiler" "g++"
  fi
  command -v git >/dev/null 2>&1 || need "git" "git"
}

check_tests() {
  [ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ] ||
    need "GoogleTest" "libgtest-dev"
}

install() {
  command -v apt-get >/dev/null 2>&1 || return 1
  as_root="env"
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || return 1
    as_root="sudo -n env"
  fi
  echo "setup: apt-get install$packages"
  log=$(mktemp)
  # shellcheck disable=SC2086
  apt="$as_root DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0"
  { $apt install -y $packages || { $apt update && $apt install -y $packages; }; } >"$log" 2>&1
  status=$?
  [ $status = 0 ] || tail -n 15 "$log" >&2
  rm -f "$log"
  return $status
}

case $purpose in
  build) check_build ;;
  tests) check_tests ;;
  *) stop "usage: check_system.sh build|tests PYTHON" ;;
esac
[ -z "$packages" ] && exit 0
echo "trae_mem: this machine lacks$missing"
install && exit 0
stop "install what is missing, then run make again:
  sudo apt-get update && sudo apt-get install -y$packages
  (Fedora: sudo dnf install gcc-c++ python3-devel gtest-devel git)"
