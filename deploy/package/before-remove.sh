#!/bin/sh
# Stops the appliances, also before an upgrade: their programs import modules while they run, and must not mix versions. Debian
# calls `prerm remove` or `prerm upgrade`, rpm `%preun 0` (removal) or `%preun 1` (after the new version was installed).
set -e
[ "$1" != 1 ] || exit 0
if [ -d /run/systemd/system ]; then
    systemctl stop tailrace.socket tailrace-verify.timer tailrace-backup.timer 'tailrace@*.service' tailrace.service
fi
[ "$1" != 0 ] || systemctl disable tailrace.service >/dev/null 2>&1 || true
