# What .ci/run and .ci/full begin with; sourced, not run. It copies the tree (changes that are not committed included) to
# $scratch/tree and goes there, so nothing is left behind and nothing that git ignores can help.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
scratch=$(mktemp -d)
log=$scratch/test.log
name=.ci/$(basename "$0")

finish() {
    status=$?
    trap - EXIT
    if [[ -f $log ]]; then
        echo "== tests: $(tail -n 1 "$log" | tr -d =)"
    fi
    if ((status == 0)); then echo "== $name passed in ${SECONDS} s"; else echo "== $name FAILED (status $status)"; fi
    rm -rf "$scratch"
    exit "$status"
}
trap finish EXIT

step() {
    echo "== $*"
    "$@"
}

mkdir "$scratch/tree"
cd "$root"
# A file that is deleted but still in the index is listed and cannot be copied: leave it out.
git -c safe.directory="$root" ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do if [[ -e $file || -L $file ]]; then printf '%s\0' "$file"; fi; done |
    tar --null --no-recursion -T - -cf - | tar -xf - -C "$scratch/tree"
cd "$scratch/tree"
git init -q && git add -A # some tests ask git which files there are
