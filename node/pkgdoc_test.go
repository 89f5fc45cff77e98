package node_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// badPackageDocs lists the packages that have not exactly one package doc, or
// one that does not say what the package is for.
func badPackageDocs(tree fs.FS) ([]string, error) {
	docs := map[string][]string{} // package folder → files with a package doc
	var bad []string
	err := walkGo(tree, func(name string, src []byte) error {
		if strings.HasSuffix(name, "_test.go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		dir := path.Dir(name)
		if _, ok := docs[dir]; !ok {
			docs[dir] = nil
		}
		if f.Doc == nil || strings.TrimSpace(f.Doc.Text()) == "" {
			return nil
		}
		docs[dir] = append(docs[dir], path.Base(name))
		if want := docStart(dir, f); !strings.HasPrefix(f.Doc.Text(), want) {
			bad = append(bad, fmt.Sprintf("%s: the package doc does not start with %q", name, want))
		}
		return nil
	})
	for _, dir := range slices.Sorted(maps.Keys(docs)) {
		if n := len(docs[dir]); n != 1 {
			bad = append(bad, fmt.Sprintf("package %s has %d package docs %v, want 1", dir, n, docs[dir]))
		}
	}
	return bad, err
}

// docStart is how a package doc begins: godoc's convention.
func docStart(dir string, f *ast.File) string {
	if f.Name.Name == "main" {
		name := path.Base(dir)
		return strings.ToUpper(name[:1]) + name[1:] + " "
	}
	return "Package " + f.Name.Name + " "
}

func TestPackageDocs(t *testing.T) {
	bad, err := badPackageDocs(os.DirFS(".."))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bad {
		t.Error(b)
	}
}

func TestPackageDocsRefuses(t *testing.T) {
	const doc, plain = "// Package a is an example.\npackage a\n", "package a\n"
	tests := []struct {
		name  string
		files map[string]string
		want  string
	}{
		{"one", map[string]string{"a/a.go": doc, "a/b.go": plain}, ""},
		{"command", map[string]string{"cmd/tool/a.go": "// Tool does it.\npackage main\n"}, ""},
		{"none", map[string]string{"a/a.go": plain}, "package a has 0 package docs"},
		{"two", map[string]string{"a/a.go": doc, "a/b.go": doc}, "package a has 2 package docs [a.go b.go]"},
		{"only in a test", map[string]string{"a/a.go": plain, "a/a_test.go": doc}, "package a has 0 package docs"},
		{"detached comment", map[string]string{"a/a.go": "// Package a.\n\npackage a\n"}, "package a has 0 package docs"},
		{"directive only", map[string]string{"a/a.go": "//go:build linux\n\npackage a\n"}, "package a has 0 package docs"},
		{"other start", map[string]string{"a/a.go": "// It is an example.\npackage a\n"}, `does not start with "Package a "`},
		{"command without name", map[string]string{"cmd/tool/a.go": "// Package main does it.\npackage main\n"}, `does not start with "Tool "`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tree := fstest.MapFS{}
			for name, src := range tt.files {
				tree[name] = &fstest.MapFile{Data: []byte(src)}
			}
			bad, err := badPackageDocs(tree)
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
