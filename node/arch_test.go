package node_test

import (
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "kvasird"

// imports is the import table of the design: what each package may import of
// ours. A package that is not listed is refused, so a new one is a decision.
// Packages that later issues bring are listed already: the table is the plan.
var imports = map[string][]string{
	"ggml/tensor":           nil,
	"ggml/gguf":             {"ggml/tensor"},
	"ggml/store":            {"ggml/gguf"},
	"ggml/tiny":             nil,
	"ggml":                  {"ggml/gguf", "ggml/tensor"},
	"p2p":                   nil,
	"p2p/fetch":             {"p2p"},
	"p2p/sim":               {"p2p"},
	"settle":                nil,
	"settle/settletest":     {"settle"},
	"settle/solana":         {"settle"},
	"settle/govern":         {"settle"},
	"market":                {"ggml/gguf", "settle"},
	"market/sim":            {"market", "settle"},
	"ring/plan":             {"ggml/gguf"},
	"ring/draft":            nil,
	"experts/place":         {"ggml/gguf"},
	"ring":                  {"ring/plan", "ring/draft", "p2p", "ggml/gguf", "ggml/tensor"},
	"experts/tolerance":     {"ggml/tensor"},
	"experts/audit":         {"experts/tolerance"},
	"experts":               {"experts/place", "experts/tolerance", "experts/audit", "p2p", "ggml/gguf", "ggml/tensor"},
	"node/api":              nil,
	"node/client":           {"node/api"},
	"node/engine":           {"ggml", "ring/draft"},
	"node/gateway":          {"node/gateway/jinja", "node/gateway/toolcall", "node/gateway/grammar"},
	"node/gateway/jinja":    nil,
	"node/gateway/toolcall": nil,
	"node/gateway/grammar":  nil,
	"node/dashboard":        nil,
	"node/kv":               nil,
	"node/cashier":          {"node/kv", "settle", "settle/solana", "settle/govern", "market", "p2p"},
	"node/meter":            {"settle", "ggml/gguf", "p2p"},
	"node/verify":           {"ggml", "ggml/gguf", "ggml/tensor", "experts/tolerance"},
	"node/pay":              {"node/cashier", "node/gateway", "settle"},
	"node/carry":            {"p2p", "node/gateway", "ggml/gguf"},
	"node":                  {anyOfOurs},
	"cmd/kvasird":           {"node"},
	"cmd/kvasir":            {"node/client", "node/api", "ggml/gguf", "market/sim"},
}

// testImports is what the tests of a package may import besides.
var testImports = map[string][]string{
	"node/verify":   {"ggml/tiny"},
	"node/engine":   {"ggml/gguf"},
	"experts/audit": {"ggml", "ggml/gguf", "ggml/tensor", "ggml/tiny"},
	"settle/solana": {"settle/settletest"},
	"node/cashier":  {"settle/settletest"},
	"node/pay":      {"settle/settletest", "settle/govern", "settle/solana"},
}

// anyOfOurs allows every package of ours except the commands.
const anyOfOurs = "*"

// topLevel is every name that git may see at the top of the tree. The folders
// in noGo hold no Go package.
var (
	topLevel = []string{"cmd", "node", "p2p", "ring", "experts", "market", "settle", "ggml",
		"go.mod", "go.sum", "Makefile", "README.md", "docs", "packaging", "LICENSE",
		".ci", ".github", ".gitignore", ".git"}
	ignored = []string{"bin", "build"}
	noGo    = []string{"docs", "packaging", ".ci", ".github"}
)

// fence keeps a module of others (a path prefix) in some of our folders.
type fence struct {
	module string
	within []string // our packages, with all below them
	except []string // import paths that are free for all: value types only
}

var fences = []fence{
	{module: "github.com/libp2p/", within: []string{"p2p"},
		except: []string{"github.com/libp2p/go-libp2p/core/peer", "github.com/libp2p/go-libp2p/core/protocol"}},
	{module: "github.com/dgraph-io/badger", within: []string{"node/kv"}},
	{module: "github.com/gagliardetto/solana-go", within: []string{"settle/solana"}},
	{module: "C", within: []string{"ggml!"}}, // the package alone
}

// importUse is one import in one file.
type importUse struct {
	file string // slash-separated, relative to the root
	path string
}

// readImports parses the Go files of a tree. It reads them in process: a
// child `go list` would give a cached pass.
func readImports(tree fs.FS) (uses []importUse, packages []string, err error) {
	seen := map[string]bool{}
	err = walkGo(tree, func(name string, src []byte) error {
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.ImportsOnly)
		if err != nil {
			return err
		}
		seen[dirOf(name)] = true
		for _, spec := range f.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			uses = append(uses, importUse{name, path})
		}
		return nil
	})
	return uses, slices.Sorted(maps.Keys(seen)), err
}

// walkGo calls fn for every Go file, the ignored folders left out.
func walkGo(tree fs.FS, fn func(name string, src []byte) error) error {
	return fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "testdata" || slices.Contains(ignored, name)):
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(name) != ".go":
			return nil
		}
		src, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		return fn(name, src)
	})
}

func dirOf(file string) string {
	i := strings.LastIndexByte(file, '/')
	if i < 0 {
		return "."
	}
	return file[:i]
}

// violations lists, in words, what the tree breaks of the rules above.
func violations(tree fs.FS) ([]string, error) {
	uses, packages, err := readImports(tree)
	if err != nil {
		return nil, err
	}
	var bad []string
	for _, p := range packages {
		if _, ok := imports[p]; !ok {
			bad = append(bad, fmt.Sprintf("package %s is not in the import table", p))
		}
	}
	for _, u := range uses {
		if msg := refuse(u); msg != "" {
			bad = append(bad, fmt.Sprintf("%s imports %s: %s", u.file, u.path, msg))
		}
	}
	top, err := fs.ReadDir(tree, ".")
	if err != nil {
		return nil, err
	}
	for _, e := range top {
		if !slices.Contains(topLevel, e.Name()) && !slices.Contains(ignored, e.Name()) {
			bad = append(bad, fmt.Sprintf("%s is not part of the top level", e.Name()))
		}
	}
	return bad, nil
}

// refuse says why a use is not allowed, or "".
func refuse(u importUse) string {
	from := dirOf(u.file)
	if top, _, _ := strings.Cut(from, "/"); slices.Contains(noGo, top) {
		return "no Go package lives in " + top
	}
	if to, ours := strings.CutPrefix(u.path, module+"/"); ours {
		return refuseOurs(from, to, strings.HasSuffix(u.file, "_test.go"))
	}
	for _, f := range fences {
		if !f.holds(u.path) || slices.Contains(f.except, u.path) {
			continue
		}
		if !slices.ContainsFunc(f.within, func(w string) bool { return inside(from, w) }) {
			return "only " + strings.TrimSuffix(strings.Join(f.within, ", "), "!") + " may import it"
		}
	}
	return ""
}

func refuseOurs(from, to string, test bool) string {
	allowed := imports[from]
	switch {
	case to == from && test: // an external test package imports what it tests
		return ""
	case slices.Contains(allowed, to), test && slices.Contains(testImports[from], to):
		return ""
	case slices.Contains(allowed, anyOfOurs) && !strings.HasPrefix(to, "cmd/"):
		return ""
	}
	return fmt.Sprintf("the import table does not let %s import %s", from, to)
}

func (f fence) holds(path string) bool {
	return path == f.module || (f.module != "C" && strings.HasPrefix(path, f.module))
}

// inside says whether the package from lies in folder w; "w!" means w alone.
func inside(from, w string) bool {
	if alone, ok := strings.CutSuffix(w, "!"); ok {
		return from == alone
	}
	return from == w || strings.HasPrefix(from, w+"/")
}

func TestArchitecture(t *testing.T) {
	root := os.DirFS("..")
	bad, err := violations(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bad {
		t.Error(b)
	}
	_, packages, err := readImports(root)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(packages, "node") || len(packages) < 5 {
		t.Errorf("read only the packages %v: is the test run in node/?", packages)
	}
}
