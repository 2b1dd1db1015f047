#!/bin/sh
# Debian calls `postrm remove`, and `postrm purge` when the data shall go, too; rpm `%postun 0`, and keeps configuration and data.
set -e
case "$1" in
    remove | 0)
        rm -rf /opt/tailrace  # byte code is no file of the package
        ;;
    purge)
        rm -rf /etc/tailrace /var/lib/tailrace /var/lib/tailrace-*
        if command -v deb-systemd-helper >/dev/null; then
            deb-systemd-helper purge tailrace.service >/dev/null
            deb-systemd-helper unmask tailrace.service >/dev/null
        fi
        ! getent passwd tailrace >/dev/null || userdel tailrace
        ;;
esac
[ ! -d /run/systemd/system ] || systemctl daemon-reload
