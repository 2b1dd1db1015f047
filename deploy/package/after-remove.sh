#!/bin/sh
# Debian calls `postrm remove`, and `postrm purge` when the data shall go, too. rpm keeps configuration and data.
set -e
case "$1" in
    remove)
        # Byte code that root's commands have written beside the package's files.
        rm -rf /opt/tailrace
        ;;
    purge)
        rm -rf /etc/tailrace /var/lib/tailrace /var/lib/tailrace-* /opt/tailrace
        if [ -x /usr/bin/deb-systemd-helper ]; then
            deb-systemd-helper purge tailrace.service >/dev/null
            deb-systemd-helper unmask tailrace.service >/dev/null
        fi
        ! getent passwd tailrace >/dev/null || userdel tailrace
        ;;
esac
[ ! -d /run/systemd/system ] || systemctl daemon-reload
