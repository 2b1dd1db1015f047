#!/bin/sh
# Debian calls `postinst configure [OLD-VERSION]`, rpm `%post 1` (new) or `%post 2` (upgrade).
set -e
case "$1" in
    configure | 1 | 2) ;;
    *) exit 0 ;;
esac
systemd-sysusers tailrace.conf
systemd-tmpfiles --create tailrace.conf
[ "$1" != configure ] || deb-systemd-helper unmask tailrace.service >/dev/null
if [ "$1" = 1 ]; then
    systemctl preset tailrace.service >/dev/null 2>&1 || true
elif [ "$1" = configure ]; then
    if deb-systemd-helper --quiet was-enabled tailrace.service; then
        deb-systemd-helper enable tailrace.service >/dev/null
    else
        deb-systemd-helper update-state tailrace.service >/dev/null
    fi
fi
# In a chroot or an image that is being built nothing is started.
[ -d /run/systemd/system ] || exit 0
# A container may not set what its host decides.
sysctl --quiet --load /usr/lib/sysctl.d/60-tailrace.conf 2>/dev/null ||
    echo "tailrace: the kernel settings of /usr/lib/sysctl.d/60-tailrace.conf take effect at the next boot"
systemctl daemon-reload
if [ "$1" = configure ]; then
    deb-systemd-invoke start tailrace.service
    # Instances that the removal of the old version stopped.
    for unit in $(systemctl list-units --all --plain --no-legend --state=inactive 'tailrace@*.service' | cut -d' ' -f1); do
        ! systemctl is-enabled --quiet "$unit" || deb-systemd-invoke start "$unit"
    done
elif [ "$1" = 2 ]; then
    systemctl start $(systemctl list-unit-files --plain --no-legend --state=enabled 'tailrace.service' | cut -d' ' -f1)
fi
