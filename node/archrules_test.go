package node_test

import (
	"strings"
	"testing"
	"testing/fstest"
)

// TestArchitectureRefuses runs the rules on small trees that break one each.
func TestArchitectureRefuses(t *testing.T) {
	tests := []struct {
		name string
		file string
		path string // what the file imports
		want string // part of the complaint; "" means allowed
	}{
		{"down is allowed", "experts/a.go", "kvasird/p2p", ""},
		{"up is refused", "p2p/a.go", "kvasird/experts", "does not let p2p import experts"},
		{"sideways is refused", "ring/a.go", "kvasird/experts", "does not let ring import experts"},
		{"in a test too", "p2p/a_test.go", "kvasird/node", "does not let p2p import node"},
		{"own package in a test", "p2p/a_test.go", "kvasird/p2p", ""},
		{"experts stay free of cgo", "experts/a.go", "kvasird/ggml", "does not let experts import ggml"},
		{"pure rules", "settle/a.go", "kvasird/p2p", "does not let settle import p2p"},
		{"gateway imports nothing", "node/gateway/a.go", "kvasird/node/engine", "does not let node/gateway"},
		{"node imports all", "node/a.go", "kvasird/experts", ""},
		{"node imports no command", "node/a.go", "kvasird/cmd/kvasird", "does not let node import cmd/kvasird"},
		{"daemon goes through node", "cmd/kvasird/a.go", "kvasird/ggml", "does not let cmd/kvasird import ggml"},
		{"client is small", "cmd/kvasir/a.go", "kvasird/node", "does not let cmd/kvasir import node"},
		{"client reads GGUF", "cmd/kvasir/a.go", "kvasird/ggml/gguf", ""},
		{"unknown package", "market/price/a.go", "fmt", "market/price is not in the import table"},
		{"unknown top level", "tools/a.go", "fmt", "tools is not part of the top level"},
		{"go file at the top", "a.go", "fmt", "a.go is not part of the top level"},
		{"go in docs", "docs/a.go", "fmt", "no Go package lives in docs"},
		{"cgo in ggml", "ggml/a.go", "C", ""},
		{"cgo elsewhere", "experts/a.go", "C", "only ggml may import it"},
		{"cgo below ggml", "ggml/gguf/a.go", "C", "only ggml may import it"},
		{"libp2p in p2p", "p2p/fetch/a.go", "github.com/libp2p/go-libp2p", ""},
		{"libp2p elsewhere", "experts/a.go", "github.com/libp2p/go-libp2p/core/host", "only p2p may import it"},
		{"libp2p value types", "experts/a.go", "github.com/libp2p/go-libp2p/core/peer", ""},
		{"badger in kv", "node/kv/a.go", "github.com/dgraph-io/badger/v4", ""},
		{"badger elsewhere", "node/a.go", "github.com/dgraph-io/badger/v4", "only node/kv may import it"},
		{"local chain in a test", "settle/solana/a_test.go", "kvasird/settle/settletest", ""},
		{"local chain elsewhere", "settle/solana/a.go", "kvasird/settle/settletest", "does not let settle/solana"},
		{"solana elsewhere", "settle/a.go", "github.com/gagliardetto/solana-go/rpc", "only settle/solana may import it"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			src := "package a\n\nimport _ \"" + tt.path + "\"\n"
			bad, err := violations(fstest.MapFS{tt.file: {Data: []byte(src)}})
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(bad, "\n")
			if (tt.want == "") != (got == "") || !strings.Contains(got, tt.want) {
				t.Errorf("complaint %q, want %q", got, tt.want)
			}
		})
	}
}

func TestArchitectureReadsEveryFile(t *testing.T) {
	tree := fstest.MapFS{
		"p2p/a.go":            {Data: []byte("package p2p\n")},
		"p2p/b_linux_test.go": {Data: []byte("//go:build never\n\npackage p2p\n\nimport _ \"C\"\n")},
		"p2p/testdata/c.go":   {Data: []byte("not go")},
		"build/d.go":          {Data: []byte("not go")},
		"ggml/lib/libx.so":    {Data: []byte("x")},
	}
	bad, err := violations(tree)
	if err != nil {
		t.Fatal(err)
	}
	if len(bad) != 1 || !strings.Contains(bad[0], "p2p/b_linux_test.go") {
		t.Errorf("complaints %q, want one about p2p/b_linux_test.go", bad)
	}
	tree["p2p/e.go"] = &fstest.MapFile{Data: []byte("package")}
	if _, err := violations(tree); err == nil {
		t.Error("a file that does not parse was accepted")
	}
}
