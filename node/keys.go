package node

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"kvasird/node/api"
	"kvasird/node/gateway"
)

// keysName is the file of the gateway's keys in the data folder, mode 0600: one
// JSON object, {"version": 1, "keys": [storedKey, …]}, with nothing unknown in it and
// nothing after it.
const keysName = "keys.json"

// Limits of the file.
const (
	keysVersion  = 1
	maxKeysFile  = 1 << 20
	maxKeys      = 1000
	maxKeyLimit  = 1 << 30
	secretPrefix = "sk-kvasir-" // so that people and scanners know what it is
	secretBytes  = 32
)

var keyName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

type keysFile struct {
	Version int         `json:"version"`
	Keys    []storedKey `json:"keys"`
}

// storedKey is a key at rest.
type storedKey struct {
	api.Key
	Hash string `json:"hash"` // gateway.HashKey in hexadecimal digits
}

// keyBook keeps the keys of the gateway: in a file, and in the ring that the gateway
// asks. It is safe for concurrent use.
type keyBook struct {
	path string
	now  func() time.Time
	ring *gateway.KeyRing

	mu   sync.Mutex // guards list, and is held while the file is written
	list []storedKey
}

// openKeys reads the file; none is no keys. A file that cannot be read is an error,
// as without its keys a gateway might let everybody in.
func openKeys(path string, now func() time.Time) (*keyBook, error) {
	text, err := readKeysFile(path)
	if err != nil {
		return nil, fmt.Errorf("keys of the gateway: %w", err)
	}
	b := &keyBook{path: path, now: now}
	if text != nil {
		if b.list, err = parseKeys(text); err != nil {
			return nil, fmt.Errorf("keys of the gateway: %s: %w: mend it, or remove it and make new keys", path, err)
		}
	}
	b.ring = gateway.NewKeyRing(ringKeys(b.list), now)
	return b, nil
}

// readKeysFile reads a little more than the longest file; nil when there is none.
func readKeysFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxKeysFile+1)) // not nil, even of an empty file
}

// parseKeys reads and checks the text of the file.
func parseKeys(text []byte) ([]storedKey, error) {
	if len(text) > maxKeysFile {
		return nil, fmt.Errorf("it is longer than %d bytes", maxKeysFile)
	}
	var f keysFile
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is something after the keys")
	}
	if f.Version != keysVersion {
		return nil, fmt.Errorf("version %d: this kvasird reads %d", f.Version, keysVersion)
	}
	if len(f.Keys) > maxKeys {
		return nil, fmt.Errorf("%d keys: at most %d", len(f.Keys), maxKeys)
	}
	for i, k := range f.Keys {
		if err := checkKey(k.Name, k.KeyLimits); err != nil {
			return nil, err
		}
		if hash, err := hex.DecodeString(k.Hash); err != nil || len(hash) != sha256.Size {
			return nil, fmt.Errorf("key %q: its hash is not %d hexadecimal digits", k.Name, 2*sha256.Size)
		}
		if slices.ContainsFunc(f.Keys[:i], func(o storedKey) bool { return o.Name == k.Name }) {
			return nil, fmt.Errorf("key %q is there twice", k.Name)
		}
	}
	slices.SortFunc(f.Keys, func(x, y storedKey) int { return cmp.Compare(x.Name, y.Name) })
	return f.Keys, nil
}

func checkKey(name string, l api.KeyLimits) error {
	if !keyName.MatchString(name) {
		return fmt.Errorf("key name %q: want 1 to 64 of A-Z a-z 0-9 . _ - beginning with a letter or digit", name)
	}
	for _, n := range []struct {
		what string
		got  int
	}{{"requests per minute", l.RequestsPerMinute}, {"tokens per minute", l.TokensPerMinute}, {"requests at once", l.Concurrent}} {
		if n.got < 0 || n.got > maxKeyLimit {
			return fmt.Errorf("key %q: %d %s: want 1 to %d, or 0 for no limit", name, n.got, n.what, maxKeyLimit)
		}
	}
	return nil
}

func ringKeys(list []storedKey) []gateway.Key {
	var keys []gateway.Key
	for _, k := range list {
		key := gateway.Key{Name: k.Name, RequestsPerMinute: k.RequestsPerMinute, TokensPerMinute: k.TokensPerMinute, Concurrent: k.Concurrent, Spend: k.Spend || k.Admin}
		hex.Decode(key.Hash[:], []byte(k.Hash)) // checked, or our own
		keys = append(keys, key)
	}
	return keys
}

// all lists the keys by name.
func (b *keyBook) all() []api.Key {
	b.mu.Lock()
	defer b.mu.Unlock()
	keys := []api.Key{}
	for _, k := range b.list {
		keys = append(keys, k.Key)
	}
	return keys
}

// admin says whether a secret is the key of an admin, in constant time for each of them.
func (b *keyBook) admin(secret string) bool {
	hash := gateway.HashKey(secret)
	text := []byte(hex.EncodeToString(hash[:]))
	b.mu.Lock()
	defer b.mu.Unlock()
	found := 0
	for _, k := range b.list {
		if k.Admin {
			found |= subtle.ConstantTimeCompare(text, []byte(k.Hash))
		}
	}
	return found == 1
}

func (b *keyBook) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list)
}

// add makes a key. It holds once add returns.
func (b *keyBook) add(req api.NewKey) (api.CreatedKey, error) {
	if err := checkKey(req.Name, req.KeyLimits); err != nil {
		return api.CreatedKey{}, &api.Error{Code: api.CodeBadRequest, Message: err.Error()}
	}
	var random [secretBytes]byte
	rand.Read(random[:]) // never fails: see crypto/rand
	secret := secretPrefix + base64.RawURLEncoding.EncodeToString(random[:])
	hash := gateway.HashKey(secret)
	key := api.Key{Name: req.Name, KeyLimits: req.KeyLimits, CreatedUnix: b.now().Unix(), Admin: req.Admin, Spend: req.Spend}
	b.mu.Lock()
	defer b.mu.Unlock()
	at, there := b.findLocked(req.Name)
	switch {
	case there:
		return api.CreatedKey{}, &api.Error{Code: api.CodeBadRequest,
			Message: fmt.Sprintf("there is a key %q: choose another name, or revoke it with `kvasir keys revoke %s`", req.Name, req.Name)}
	case len(b.list) >= maxKeys:
		return api.CreatedKey{}, &api.Error{Code: api.CodeBadRequest, Message: fmt.Sprintf("there are %d keys, the most that are kept: revoke one", maxKeys)}
	}
	list := slices.Insert(slices.Clone(b.list), at, storedKey{Key: key, Hash: hex.EncodeToString(hash[:])})
	return api.CreatedKey{Key: key, Secret: secret}, b.replaceLocked(list)
}

// revoke ends a key and says how many are left.
func (b *keyBook) revoke(name string) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	at, there := b.findLocked(name)
	if !there {
		var names []string
		for _, k := range b.list {
			names = append(names, k.Name)
		}
		return 0, &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("there is no key %q%s", name, Suggest(name, names))}
	}
	list := slices.Delete(slices.Clone(b.list), at, at+1)
	return len(list), b.replaceLocked(list)
}

func (b *keyBook) findLocked(name string) (at int, there bool) {
	return slices.BinarySearchFunc(b.list, name, func(k storedKey, name string) int { return cmp.Compare(k.Name, name) })
}

// replaceLocked writes the file, then has the gateway go by it.
func (b *keyBook) replaceLocked(list []storedKey) error {
	if err := writeJSON(b.path, keysFile{Version: keysVersion, Keys: list}); err != nil {
		return fmt.Errorf("keys of the gateway: %w", err)
	}
	b.list = list
	b.ring.Set(ringKeys(list))
	return nil
}
