#!/bin/sh
# Stops the appliances, also before an upgrade: their programs import modules while they run, and must not mix versions. Debian
# calls `prerm remove` or `prerm upgrade`, rpm `%preun 0` (removal) or `%preun 1` (upgrade, after the new version is installed).
set -e
[ "$1" != 1 ] || exit 0
if [ -d /run/systemd/system ]; then
    systemctl stop 'tailrace@*.service' tailrace.service tailrace-verify.timer
fi
if [ "$1" = 0 ]; then
    systemctl disable tailrace.service >/dev/null 2>&1 || true
fi
