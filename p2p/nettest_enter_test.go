//go:build nettest && linux

// The network suite (make test-net) runs nodes in network namespaces: behind NATs, across
// slow and lossy lines, through outages. It moves into PID, mount and network namespaces
// of its own first, so whatever ends it, nothing of it stays behind.
package p2p_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// roleEnv says what a run of this test binary is: unset, the one that go test started;
// "suite", the tests, in namespaces of their own; "node", a node under test.
const roleEnv = "KVASIR_NETTEST"

func init() {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(enter())
	case "suite":
		if err := settle(); err != nil {
			fmt.Fprintln(os.Stderr, "network suite:", err)
			os.Exit(1)
		}
	case "node":
		os.Exit(nodeMain())
	default:
		fmt.Fprintf(os.Stderr, "network suite: %s=%q\n", roleEnv, role)
		os.Exit(2)
	}
}

// needs says what this machine lacks for the suite.
func needs() error {
	if os.Geteuid() != 0 {
		return errors.New("not root, which making network namespaces takes: run it with sudo, or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN")
	}
	for tool, pkg := range map[string]string{"ip": "iproute2", "nft": "nftables"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s is missing: install it (Debian: apt-get install %s)", tool, pkg)
		}
	}
	tun, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("%v: the delay line takes a TUN device (modprobe tun)", err)
	}
	return tun.Close()
}

// enter runs this binary again in new namespaces and returns its exit status. The tests'
// process is init in there: when it ends, so do the nodes.
func enter() int {
	if err := needs(); err != nil {
		fmt.Fprintln(os.Stderr, "network suite:", err)
		return 1
	}
	suite := exec.Command("/proc/self/exe", os.Args[1:]...)
	suite.Env = append(os.Environ(), roleEnv+"=suite")
	suite.Stdin, suite.Stdout, suite.Stderr = os.Stdin, os.Stdout, os.Stderr
	suite.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL, // holds: init functions run on the main thread
	}
	err := suite.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return exit.ExitCode()
	}
	fmt.Fprintln(os.Stderr, "network suite:", err)
	return 1
}

// settle makes the new mount namespace fit the others: a /proc of its processes, and a
// /run where ip keeps the names of namespaces.
func settle() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return os.Mkdir(netnsDir, 0o755)
}
