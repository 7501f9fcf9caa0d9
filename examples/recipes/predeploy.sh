#!/bin/sh
# Verify bundles before they are deployed. Stops at the first that fails, with its exit code; and with 1 if sums.txt
# lists no bundle, or if a folder next to one of the bundles, also a hidden one, isn't in it.
#
#     sh sums.sh build.json > sums.txt            # on the builder
#     sh predeploy.sh sums.txt                    # where the bundles are deployed
#
# The hashes show that a bundle is the builder's only if sums.txt comes on another way than the bundles, such as an output
# of the CI job.
set -eu

# Whether a folder is a bundle in the list, or contains one.
is_listed() {
    while read -r sha file || [ -n "$sha" ]; do
        place=$(dirname "$file")
        while ! [ "$place" -ef "$1" ] && [ "$place" != . ] && [ "$place" != / ]; do place=$(dirname "$place"); done
        if [ "$place" -ef "$1" ]; then return 0; fi
    done < "$2"
    return 1
}

bundle=
# The last line may lack its end.
while read -r sha file || [ -n "$sha" ]; do
    [ -n "$sha" ] || continue
    bundle=$(dirname "$file")
    ${OPTIMIZE_EXPORT:-optimize-export} verify "$bundle" --expect "$sha" --device cpu < /dev/null
    parent=$(dirname "$bundle")
    for folder in "$parent"/*/ "$parent"/.[!.]*/ "$parent"/..?*/; do
        if [ -d "$folder" ] && ! is_listed "$folder" "$1"; then
            echo "predeploy.sh: $folder isn't in $1: delete it, or build it" >&2
            exit 1
        fi
    done
done < "$1"
if [ -z "$bundle" ]; then
    echo "predeploy.sh: $1 lists no bundle" >&2
    exit 1
fi
