#!/bin/sh
# Verify the bundles of a folder with other versions of their runtimes, and next to the installed ones. All bundles are run;
# the exit code is the highest, and 1 without a bundle.
#
#     sh upgrade-gate.sh dist onnxruntime==1.24.1 onnxruntime
#
# Each further word is a set of its own. Without a version it is the newest. results/ gets a test report of each bundle.
set -eu

folder=$1
shift
for set in "$@"; do
    set -- "$@" --with "$set"
    shift
done
highest=0
count=0
for bundle in "$folder"/*/; do
    [ -f "$bundle/manifest.json" ] || continue
    count=$((count + 1))
    name=$(basename "$bundle")
    ${OPTIMIZE_EXPORT:-optimize-export} verify "$bundle" "$@" --junit "results/$name.xml" < /dev/null && code=0 || code=$?
    [ "$code" -le "$highest" ] || highest=$code
done
if [ "$count" = 0 ]; then
    echo "upgrade-gate.sh: $folder has no bundle" >&2
    exit 1
fi
exit "$highest"
