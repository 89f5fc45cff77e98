//go:build sdk && cgo && linux

package node

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestJavaScriptClients runs the tests in testdata/sdk, whose packages
// `make test-sdk` installs.
func TestJavaScriptClients(t *testing.T) {
	wide, tight := runSDKDaemon(t), runSDKDaemon(t, narrow...)
	bias, err := json.Marshal(endBias())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(wide.ctx, "node", "--test", "--test-reporter=spec", "--test-concurrency=1")
	cmd.Dir = "testdata/sdk"
	cmd.Env = append(os.Environ(), "KVASIR_URL=http://"+wide.http, "KVASIR_NARROW_URL=http://"+tight.http, "KVASIR_MODEL="+shippedModel,
		"KVASIR_END_BIAS="+string(bias))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if _, tests, _ := strings.Cut(string(out), "ℹ tests "); strings.HasPrefix(tests, "0\n") || tests == "" {
		t.Fatalf("no test ran:\n%s", out)
	}
	t.Logf("%s", out)
}
