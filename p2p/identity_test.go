package p2p

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
)

func TestIdentityCreatedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data", "identity.key")
	const n = 8
	ids := make([]peer.ID, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			id, err := LoadOrCreateIdentity(path)
			if err != nil {
				t.Error(err)
			}
			ids[i] = id.ID()
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id == "" || id != ids[0] {
			t.Fatalf("ids differ: %v", ids)
		}
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode().Perm() != 0o600 {
		t.Errorf("mode %04o, want 0600", st.Mode().Perm())
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 1 {
		t.Errorf("folder holds %d files, want the key alone", len(left))
	}
}

func TestIdentityRefused(t *testing.T) {
	key, _, err := crypto.GenerateSecp256k1Key(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := crypto.MarshalPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		data []byte
		mode os.FileMode
		want string
	}{
		{"readable by group", []byte("x"), 0o640, "chmod 600"},
		{"readable by others", []byte("x"), 0o604, "chmod 600"},
		{"empty", nil, 0o600, "damaged"},
		{"garbage", []byte("not a key"), 0o600, "damaged"},
		{"huge", bytes.Repeat([]byte("x"), maxKeyFile+1), 0o600, "larger than"},
		{"another kind", other, 0o600, "want Ed25519"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "identity.key")
			if err := os.WriteFile(path, tt.data, tt.mode); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, tt.mode); err != nil {
				t.Fatal(err)
			}
			_, err := LoadOrCreateIdentity(path)
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("got %v, want an error with %q and the path", err, tt.want)
			}
			after, err := os.ReadFile(path)
			if err != nil || !bytes.Equal(after, tt.data) {
				t.Errorf("the file was changed (%v)", err)
			}
		})
	}
	if _, err := LoadOrCreateIdentity(t.TempDir()); err == nil {
		t.Error("a folder was taken for a key")
	}
}

func TestCreateIdentity(t *testing.T) {
	path := filepath.Join(t.TempDir(), "authority.key")
	if _, err := LoadIdentity(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("load what is not there: %v", err)
	}
	id, err := CreateIdentity(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := CreateIdentity(path); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create again: %v", err)
	}
	if got, err := LoadIdentity(path); err != nil || got.ID() != id.ID() {
		t.Errorf("load: %v, %v", got.ID(), err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func FuzzIdentity(f *testing.F) {
	f.Add([]byte{8, 1, 18, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		if id, err := parseIdentity(raw, "key"); err == nil && id.ID() == "" {
			t.Error("a key without an id")
		}
	})
}
