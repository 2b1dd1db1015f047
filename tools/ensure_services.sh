#!/bin/sh
# Programs that tests hold Tailrace against: redis-server, Prometheus' promtool, the browser Chromium. Uses those that are there; installs the system's packages when run as
# root, without starting their services; else says what to install, and the tests that need one are skipped with a sentence.
set -eu

missing=
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
command -v promtool >/dev/null 2>&1 || missing="$missing prometheus"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "tailrace: installing$missing for the tests"
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    # shellcheck disable=SC2086 # a list of packages
    if { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1; then
        exit 0
    fi
fi
echo "tailrace: without$missing (apt-get install$missing) their tests are skipped" >&2
