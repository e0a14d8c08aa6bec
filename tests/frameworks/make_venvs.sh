#!/usr/bin/env bash
# Makes the environments of tests/frameworks in DIR: bash tests/frameworks/make_venvs.sh DIR
# Then: MEMO_FRAMEWORKS=DIR pytest tests/frameworks -m frameworks
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=${1:?"name a folder for the environments"}
for name in huggingface torchtitan; do
    [[ -x $target/$name/bin/python ]] || python3 -m venv "$target/$name"
    "$target/$name/bin/pip" install --quiet -r "$here/requirements-$name.txt"
done
DS_BUILD_OPS=0 "$target/huggingface/bin/pip" install --quiet --no-deps --no-build-isolation \
    -r "$here/requirements-deepspeed.txt"
