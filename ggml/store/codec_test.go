package store

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"kvasird/ggml/gguf"
	"lukechampine.com/blake3"
)

// seal makes the checksum of a changed set right again.
func seal(b []byte) []byte {
	body := b[:len(b)-32]
	sum := blake3.Sum256(body)
	return append(bytes.Clone(body), sum[:]...)
}

func TestHeldSet(t *testing.T) {
	const size = 11*Group + 5
	root := [32]byte{1, 2, 3}
	set := newGroupSet(size)
	for _, g := range []int{0, 7, 8, 11} {
		set.add(g)
	}
	text := encodeHeld(root, set)
	want := append([]byte("kvheld1\n\x05\x00\x2c\x00\x00\x00\x00\x00\x01\x02\x03"), make([]byte, 29)...)
	if want = append(want, 0x81, 0x09); !bytes.Equal(text[:len(text)-32], want) || int64(len(text)) != heldSize(size) {
		t.Errorf("encoded as %q, want %q and a hash", text, want)
	}
	back, err := decodeHeld(size, root, text)
	if err != nil || !bytes.Equal(encodeHeld(root, back), text) || back.bytes != 3*Group+5 {
		t.Errorf("decoded as %v, %v", back, err)
	}
	change := func(at int, x byte) []byte {
		b := bytes.Clone(text)
		b[at] ^= x
		return b
	}
	for _, tt := range []struct {
		name string
		size int64
		root [32]byte
		text []byte
	}{
		{"empty", size, root, nil},
		{"cut off", size, root, text[:len(text)-1]},
		{"torn", size, root, append(bytes.Clone(text[:40]), make([]byte, len(text)-40)...)},
		{"longer", size, root, append(bytes.Clone(text), 0)},
		{"flipped bit", size, root, change(len(heldMagic)+41, 1)},
		{"flipped hash", size, root, change(len(text)-1, 1)},
		{"magic", size, root, seal(change(6, 3))},
		{"size inside", size, root, seal(change(8, 1))},
		{"group after the last", size, root, seal(change(heldHeader+1, 0x10))},
		{"of another size", size + 1, root, text},
		{"of another file", size, [32]byte{1, 2, 4}, text},
	} {
		if _, err := decodeHeld(tt.size, tt.root, tt.text); err == nil {
			t.Errorf("%s: accepted", tt.name)
		}
	}
}

func FuzzHeldSet(f *testing.F) {
	const size = 11*Group + 5
	set := newGroupSet(size)
	f.Add(encodeHeld([32]byte{}, set))
	set.fill()
	f.Add(encodeHeld([32]byte{}, set))
	f.Add(seal(append(encodeHeld([32]byte{}, set), 0)))
	f.Fuzz(func(t *testing.T, b []byte) {
		set, err := decodeHeld(size, [32]byte{}, b)
		if err == nil && !bytes.Equal(encodeHeld([32]byte{}, set), b) {
			t.Errorf("%x is not the one encoding of its set", b)
		}
		if len(b) < 32 {
			return
		}
		if set, err := decodeHeld(size, [32]byte{}, seal(b)); err == nil && !bytes.Equal(encodeHeld([32]byte{}, set), seal(b)) {
			t.Errorf("%x, sealed, is not the one encoding of its set", b)
		}
	})
}

func FuzzTree(f *testing.F) {
	fx := newFixture(randomData(1, 3*Group+1))
	f.Add(fx.trees[0])
	f.Add(fx.trees[0][:8])
	f.Fuzz(func(t *testing.T, tree []byte) {
		leaves, reason := checkTree(fx.sums[0].Size, fx.sums[0].Root, tree)
		if (reason == "") != bytes.Equal(tree, fx.trees[0]) || reason == "" && len(leaves) != 4 {
			t.Errorf("tree %x: %q", tree, reason)
		}
	})
}

func manifestOf(fx *fixture) *manifest {
	man := &manifest{Version: manifestVersion}
	for _, sum := range fx.sums {
		man.Files = append(man.Files, manifestFile{FileSum: sum})
	}
	return man
}

func TestParseManifest(t *testing.T) {
	fx := newFixture(randomData(1, 10), randomData(2, 20))
	man := manifestOf(fx)
	man.Pinned = true
	man.Files[1].Source = &source{Path: "/models/a.gguf", Size: 20, MTime: 5, Inode: 6, Kept: keptClone, Origin: 7}
	text, err := man.encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := parseManifest(fx.id, text)
	if err != nil || !back.Pinned || back.Files[1] != (manifestFile{man.Files[1].FileSum, back.Files[1].Source}) || *back.Files[1].Source != *man.Files[1].Source {
		t.Errorf("parsed as %+v, %v", back, err)
	}
	replace := func(old, new string) string {
		out := strings.Replace(string(text), old, new, 1)
		if out == string(text) {
			t.Fatalf("%q is not in %s", old, text)
		}
		return out
	}
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "EOF"},
		{"torn", string(text[:len(text)/2]), "unexpected EOF"},
		{"zeros", string(make([]byte, len(text))), "invalid character"},
		{"trailing", string(text) + "{}", "bytes after the object"},
		{"unknown field", replace(`"version"`, `"x": 1, "version"`), "unknown field"},
		{"version", replace(`"version": 1`, `"version": 2`), "version 2"},
		{"relative source", replace(`"/models`, `"models`), "not an absolute path"},
		{"zero byte in source", replace(`/models`, `/mod\u0000els`), "not an absolute path"},
		{"long source", replace(`/models`, "/"+strings.Repeat("m", maxPathBytes)), "not an absolute path"},
		{"kept otherwise", replace(`"kept": "clone"`, `"kept": "copy"`), "kept as"},
		{"other file", replace(`"size": 10`, `"size": 11`), "those of model"},
		{"no file", `{"version": 1}`, "0 files"},
		{"too long", string(text) + strings.Repeat(" ", maxManifestBytes), "more than"},
	} {
		if _, err := parseManifest(fx.id, []byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
	}
}

func FuzzManifest(f *testing.F) {
	fx := newFixture(randomData(1, 10), randomData(2, 20))
	man := manifestOf(fx)
	man.Files[0].Source = &source{Path: "/a.gguf", Size: 10, MTime: 5, Inode: 6}
	text, err := man.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(fx.id[:], text)
	f.Fuzz(func(t *testing.T, id, text []byte) {
		if len(id) != len(gguf.ModelID{}) {
			return
		}
		man, err := parseManifest(gguf.ModelID(id), text)
		if err != nil {
			return
		}
		again, err := man.encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := parseManifest(gguf.ModelID(id), again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		a, _ := json.Marshal(man)
		if b, _ := json.Marshal(back); !bytes.Equal(a, b) {
			t.Errorf("%s became %s", a, b)
		}
	})
}

func TestAlign(t *testing.T) {
	const size = 5*Group + 10
	for _, tt := range []struct {
		name     string
		in, want []Span
	}{
		{"nothing", nil, nil},
		{"one byte", []Span{{Group + 5, 1}}, []Span{{Group, Group}}},
		{"over a border", []Span{{2*Group - 1, 2}}, []Span{{Group, 2 * Group}}},
		{"touching", []Span{{3 * Group, 1}, {2 * Group, Group}}, []Span{{2 * Group, 2 * Group}}},
		{"inside another", []Span{{0, 3 * Group}, {Group, 1}}, []Span{{0, 3 * Group}}},
		{"apart", []Span{{4 * Group, 1}, {0, 1}}, []Span{{0, Group}, {4 * Group, Group}}},
		{"the end", []Span{{5 * Group, 1}}, []Span{{5 * Group, 10}}},
		{"past the end", []Span{{5*Group + 9, 1 << 62}}, []Span{{5 * Group, 10}}},
		{"after the end", []Span{{size, 1}}, nil},
		{"senseless", []Span{{-1, 5}, {0, 0}, {0, -7}}, nil},
	} {
		got := align(size, tt.in)
		if len(got) != len(tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
			continue
		}
		for i := range got {
			if got[i] != tt.want[i] {
				t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
			}
		}
	}
}
