#!/bin/sh
# The tools of the tests that build packages: mmdebstrap, lintian and rpm. Where they cannot be installed, those tests are skipped and say so.
set -u
missing=
for tool in mmdebstrap lintian rpm; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "tailrace: without$missing the tests of the packages are skipped"
    exit 0
fi
echo "tailrace: installing$missing for the tests of the packages"
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $missing >/dev/null ||
    echo "tailrace:$missing cannot be had; the tests of the packages are skipped"
