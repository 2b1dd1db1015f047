#!/bin/sh
# The tools of the tests that build packages: mmdebstrap and lintian. Where they cannot be installed, those tests are skipped and say so.
set -u
missing=
for tool in mmdebstrap lintian; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tailrace: without$missing the tests of the Debian package are skipped"
    exit 0
fi
echo "tailrace: installing$missing for the tests of the Debian package"
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $missing >/dev/null ||
    echo "tailrace:$missing cannot be had; the tests of the Debian package are skipped"
