#!/usr/bin/env bash
# Check before a release that uv installs the last commit: needs a network, some minutes and 4 GB of disk.
# Arguments go to `uv sync`, such as --index pytorch-cpu=file:///mirror in place of download.pytorch.org.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git archive HEAD | tar --extract --directory "$folder"
cd "$folder"
uv sync --extra cpu "$@"
.venv/bin/ballast doctor
uv build --wheel --quiet
uvx --from dist/*.whl --with torch==2.13.0 ballast --help
