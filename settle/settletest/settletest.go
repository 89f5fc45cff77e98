// Package settletest runs a local Solana for tests: a real runtime (LiteSVM) behind
// JSON-RPC on loopback, in a process of node's, with slots that advance by hand,
// rollbacks, and faults. README.md says what is not faithful.
//
// It also builds and signs transactions by itself, byte by byte, and not with the SDK
// that package solana uses: what one writes, the other reads.
//
// A failure ends the test that called. Methods may be called by several goroutines.
package settletest

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"kvasird/settle"
)

// TB is what is used of a test: testing.TB has it.
type TB interface {
	Helper()
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// Chain is a running chain. It ends with its test.
type Chain struct {
	t    TB
	base string // http://127.0.0.1:port
	http *http.Client

	funded atomic.Int64 // how often Fund was called
}

const (
	startTime = 20 * time.Second
	callTime  = 20 * time.Second
)

// Start starts a chain whose slots advance by Advance only.
func Start(t TB) *Chain { t.Helper(); return start(t, 0) }

// StartTicking starts a chain that goes on by itself, a slot every so long.
func StartTicking(t TB, slot time.Duration) *Chain { t.Helper(); return start(t, slot) }

func start(t TB, slot time.Duration) *Chain {
	t.Helper()
	dir, err := programDir()
	if err != nil {
		t.Fatalf("the local chain: %v", err)
	}
	cmd := exec.Command("node", "server.js", strconv.FormatInt(slot.Milliseconds(), 10))
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe() // the process ends when this does
	if err != nil {
		t.Fatalf("the local chain: %v", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatalf("the local chain: %v", err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("the local chain needs Node.js 20 or later: %v", err)
	}
	t.Cleanup(func() {
		stdin.Close()
		late := time.AfterFunc(5*time.Second, func() { cmd.Process.Kill() })
		defer late.Stop()
		cmd.Wait()
	})
	port, err := readyPort(stdout)
	if err != nil {
		cmd.Process.Kill()
		t.Fatalf("the local chain did not start: %v\n%s", err, stderr.String())
	}
	return &Chain{t: t, base: "http://127.0.0.1:" + port, http: &http.Client{Timeout: callTime}}
}

// programDir is the folder of the server, found from the working directory upwards.
func programDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; ; dir = filepath.Dir(dir) {
		svm := filepath.Join(dir, "settle", "settletest", "svm")
		if _, err := os.Stat(filepath.Join(svm, "server.js")); err == nil {
			if _, err := os.Stat(filepath.Join(svm, "node_modules", "litesvm-linux-x64-gnu")); err != nil {
				return "", errors.New("the runtime is missing: run make settle-deps")
			}
			return svm, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no settle/settletest/svm above the working directory")
		}
	}
}

func readyPort(stdout io.Reader) (string, error) {
	line := make(chan string, 1)
	go func() {
		s, _ := bufio.NewReader(stdout).ReadString('\n')
		line <- s
	}()
	select {
	case s := <-line:
		port, ok := strings.CutPrefix(strings.TrimSpace(s), "READY ")
		if !ok {
			return "", fmt.Errorf("it wrote %q, not READY and a port", s)
		}
		return port, nil
	case <-time.After(startTime):
		return "", fmt.Errorf("nothing after %v", startTime)
	}
}

// URL is the RPC endpoint of a provider. All names lead to the one chain; a Fault can
// be of one of them.
func (c *Chain) URL(provider string) string { return c.base + "/" + provider }

// RPCError is an error that the chain answered.
type RPCError struct {
	Code    int
	Message string
	Data    json.RawMessage
}

func (e *RPCError) Error() string { return fmt.Sprintf("%d: %s %s", e.Code, e.Message, e.Data) }

// Call calls a method and gives its result, or an *RPCError.
func (c *Chain) Call(method string, params ...any) (json.RawMessage, error) {
	c.t.Helper()
	if params == nil {
		params = []any{}
	}
	body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
	if err != nil {
		c.t.Fatalf("%s: %v", method, err)
	}
	resp, err := c.http.Post(c.URL("tests"), "application/json", bytes.NewReader(body))
	if err != nil {
		c.t.Fatalf("%s: %v", method, err)
	}
	defer resp.Body.Close()
	var answer struct {
		Result json.RawMessage
		Error  *RPCError
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		c.t.Fatalf("%s: %v", method, err)
	}
	if answer.Error != nil {
		return nil, answer.Error
	}
	return answer.Result, nil
}

// into calls a method that has to succeed.
func (c *Chain) into(out any, method string, params ...any) {
	c.t.Helper()
	result, err := c.Call(method, params...)
	if err != nil {
		c.t.Fatalf("%s: %v", method, err)
	}
	if err := json.Unmarshal(result, out); err != nil {
		c.t.Fatalf("%s: %v in %s", method, err, result)
	}
}

// Slot is the current slot.
func (c *Chain) Slot() (slot uint64) {
	c.t.Helper()
	c.into(&slot, "getSlot", map[string]string{"commitment": "processed"})
	return slot
}

// Advance goes so many slots on. After 1 what has landed is confirmed, after 32 it is
// finalized, and 150 are the life of a blockhash at most.
func (c *Chain) Advance(slots int) (slot uint64) {
	c.t.Helper()
	c.into(&slot, "harness_advance", slots)
	return slot
}

// Rollback makes all undone that came after a slot.
func (c *Chain) Rollback(slot uint64) {
	c.t.Helper()
	c.into(&slot, "harness_rollback", slot)
}

// Fault is something that goes wrong with calls of methods. Zero fields are any
// provider, any method, any first parameter, for ever.
type Fault struct {
	Path   string `json:"path,omitempty"` // "/" and the provider's name
	Method string `json:"method,omitempty"`
	First  string `json:"first,omitempty"` // the first parameter
	Times  int    `json:"times,omitempty"` // how often, then it is over

	// What happens: one of them, or a delay alone.
	HTTP   *HTTPFault      `json:"http,omitempty"`
	Error  *RPCFault       `json:"error,omitempty"`
	Result json.RawMessage `json:"result,omitempty"` // the answer in place of the true one
	Delay  int             `json:"delay,omitempty"`  // milliseconds
	Drop   bool            `json:"drop,omitempty"`   // the connection breaks
}

// HTTPFault is an answer that is no JSON-RPC.
type HTTPFault struct {
	Status int    `json:"status"`
	Body   string `json:"body"`
}

// RPCFault is an error of a node's.
type RPCFault struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// Fault adds a fault; the newest comes first.
func (c *Chain) Fault(f Fault) {
	c.t.Helper()
	var ok bool
	c.into(&ok, "harness_fault", f)
}

// ClearFaults ends all faults.
func (c *Chain) ClearFaults() {
	c.t.Helper()
	var ok bool
	c.into(&ok, "harness_clearFaults")
}

// SetAccount makes an account as if it had always been so.
func (c *Chain) SetAccount(address, owner settle.Key, lamports uint64, data []byte) {
	c.t.Helper()
	var ok bool
	c.into(&ok, "harness_setAccount", map[string]any{
		"address": address, "owner": owner, "lamports": lamports, "data": base64.StdEncoding.EncodeToString(data)})
}

// AddProgram installs an ELF file as a program.
func (c *Chain) AddProgram(address settle.Key, elf []byte) {
	c.t.Helper()
	var ok bool
	c.into(&ok, "harness_addProgram", map[string]any{"address": address, "data": base64.StdEncoding.EncodeToString(elf)})
}

// Airdrop gives a wallet lamports.
func (c *Chain) Airdrop(to settle.Key, lamports uint64) {
	c.t.Helper()
	var sig string
	c.into(&sig, "requestAirdrop", to, lamports)
}

// Balance is what a token account holds.
func (c *Chain) Balance(account settle.Key) settle.Amount {
	c.t.Helper()
	var answer struct {
		Value struct{ Amount settle.Amount }
	}
	c.into(&answer, "getTokenAccountBalance", account)
	return answer.Value.Amount
}

// Blockhash is what new transactions name, and the last block height at which they
// can land.
func (c *Chain) Blockhash() (hash settle.Key, lastValid uint64) {
	c.t.Helper()
	var answer struct {
		Value struct {
			Blockhash            settle.Key
			LastValidBlockHeight uint64
		}
	}
	c.into(&answer, "getLatestBlockhash")
	return answer.Value.Blockhash, answer.Value.LastValidBlockHeight
}

// Rent is what an account of so many bytes has to hold.
func (c *Chain) Rent(size int) (lamports uint64) {
	c.t.Helper()
	c.into(&lamports, "getMinimumBalanceForRentExemption", size)
	return lamports
}

// SendRaw sends a signed transaction. Without preflight one that fails lands too, or is
// dropped without an error.
func (c *Chain) SendRaw(raw []byte, preflight bool) (sig settle.Signature, err error) {
	c.t.Helper()
	result, err := c.Call("sendTransaction", base64.StdEncoding.EncodeToString(raw),
		map[string]any{"encoding": "base64", "skipPreflight": !preflight})
	if err != nil {
		return sig, err
	}
	return sig, json.Unmarshal(result, &sig)
}

// Answer is what a node says of a transaction (confirmed at least), to be changed and
// given back by a Fault.
func (c *Chain) Answer(sig settle.Signature) map[string]any {
	c.t.Helper()
	var answer map[string]any
	c.into(&answer, "getTransaction", sig, map[string]any{"encoding": "base64", "commitment": "confirmed", "maxSupportedTransactionVersion": 1})
	return answer
}
