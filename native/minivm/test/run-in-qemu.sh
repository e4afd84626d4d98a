#!/bin/sh
# Runs machine_test on the KVM guest where this machine has no /dev/kvm: QEMU emulates a CPU with
# SVM, Debian's kernel boots on it with KVM loaded, and the test runs inside. Needs the Debian
# packages qemu-system-x86, busybox-static, cpio and g++. Takes two minutes; not in `npm test`.
#
#   run-in-qemu.sh [folder with an unpacked linux-image-*-cloud-amd64 package]
#
# Without an argument it downloads the package with apt-get (nothing is installed or booted here).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
native=$(cd "$here/../.." && pwd)
out="$here/../../test/out/qemu"
mkdir -p "$out"
out=$(cd "$out" && pwd)

kernel=${1:-"$out/kernel"}
if [ ! -d "$kernel/boot" ]; then
  package=$(apt-cache depends linux-image-cloud-amd64 |
    sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p')
  (cd "$out" && apt-get download "$package")
  mkdir -p "$kernel"
  dpkg-deb -x "$out/$package"_*.deb "$kernel"
fi

sources=$(ls "$native"/minivm/*.cpp | grep -v /addon.cpp)
# shellcheck disable=SC2086
g++ -static -std=c++20 -O2 -Wall -Wextra -fno-exceptions -D_GNU_SOURCE -I"$native" \
  "$here/machine_test.cpp" $sources -o "$out/machine_test"

root="$out/root"
rm -rf "$root"
mkdir -p "$root/bin" "$root/dev" "$root/proc" "$root/sys" "$root/tmp" "$root/modules"
cp /bin/busybox "$root/bin/busybox"
cp "$out/machine_test" "$root/bin/machine_test"
for module in irqbypass kvm kvm-amd; do
  cp "$(find "$kernel/lib/modules" -name "$module.ko")" "$root/modules/"
done
cat > "$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t tmpfs tmp /tmp
for module in irqbypass kvm kvm-amd; do /bin/busybox insmod /modules/$module.ko; done
/bin/busybox ls -l /dev/kvm
/bin/machine_test kvm
echo "machine_test kvm: exit $?"
/bin/busybox poweroff -f
INIT
chmod +x "$root/init"
cp /bin/busybox "$root/bin/sh"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) > "$out/initramfs.gz"

timeout 1500 qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu EPYC,+svm \
  -m 1024 -smp 2 -nic none -nographic -no-reboot \
  -kernel "$(ls "$kernel"/boot/vmlinuz-*)" -initrd "$out/initramfs.gz" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off" 2>"$out/qemu.err" | tee "$out/log"
grep -q 'machine_test kvm: exit 0' "$out/log"
