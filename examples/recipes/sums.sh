#!/bin/sh
# Write the hash of each bundle in the JSON document of `build --all`, as sha256sum does. Bundles in dist/ of models that
# are no longer in the config aren't listed.
#
#     optimize-export build --config models.toml --all --json > build.json
#     sh sums.sh build.json > sums.txt
set -eu
python3 -c '
import json, sys
for model in json.load(open(sys.argv[1]))["models"].values():
    print(model["sha256sums"], model["bundle"] + "/SHA256SUMS", sep="  ")
' "$1"
