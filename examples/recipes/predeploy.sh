#!/bin/sh
# Verify bundles before they are deployed. Stops with the exit code of the first that fails.
#
#     sha256sum dist/*/SHA256SUMS > sums.txt      # on the builder
#     sh predeploy.sh sums.txt                    # where the bundles are deployed
#
# The hashes show that a bundle is the builder's only if sums.txt comes on another way than the bundles, such as an output
# of the CI job.
set -eu
while read -r sha file; do
    ${OPTIMIZE_EXPORT:-optimize-export} --verify "$(dirname "$file")" --expect "$sha" --device cpu
done < "$1"
