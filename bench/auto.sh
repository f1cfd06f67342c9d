#!/bin/sh
# Decisions held against an exhaustive search on this machine: measures it, then runs every
# alternative of thirty configurations. For a machine with nothing else to do; about twenty minutes.
#   bench/auto.sh [NAME]    writes bench/record/auto-NAME.txt and .json
set -eu
cd "$(dirname "$0")/.."
name=${1:-$(uname -n)}
cargo build --release -p encke-cli
encke=${CARGO_TARGET_DIR:-target}/release/encke
"$encke" tune
"$encke" tune --check --record "bench/record/auto-$name.json" | tee "bench/record/auto-$name.txt"
