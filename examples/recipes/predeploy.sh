#!/bin/sh
# Verify bundles before they are deployed. Stops at the first that fails, with its exit code; and with 1 if sums.txt
# lists no bundle, or if a folder next to the bundles isn't in it.
#
#     sh sums.sh build.json > sums.txt            # on the builder
#     sh predeploy.sh sums.txt                    # where the bundles are deployed
#
# The hashes show that a bundle is the builder's only if sums.txt comes on another way than the bundles, such as an output
# of the CI job.
set -eu
last=
# The last line may lack its end.
while read -r sha file || [ -n "$sha" ]; do
    [ -n "$sha" ] || continue
    last=$(dirname "$file")
    ${OPTIMIZE_EXPORT:-optimize-export} --verify "$last" --expect "$sha" --device cpu < /dev/null
done < "$1"
if [ -z "$last" ]; then
    echo "predeploy.sh: $1 lists no bundle" >&2
    exit 1
fi
for folder in "$(dirname "$last")"/*/; do
    if ! grep -qF "  ${folder}SHA256SUMS" "$1"; then
        echo "predeploy.sh: $folder isn't in $1: delete it, or build it" >&2
        exit 1
    fi
done
