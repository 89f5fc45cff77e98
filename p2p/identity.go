package p2p

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/libp2p/go-libp2p/core/crypto"
	"github.com/libp2p/go-libp2p/core/peer"
)

// maxKeyFile bounds what is read as a key: an ed25519 key takes 68 bytes.
const maxKeyFile = 1 << 10

// Identity is a node's ed25519 key and the peer id that follows from it. The zero value
// is not usable: it comes from LoadOrCreateIdentity or NewIdentity.
type Identity struct {
	id  peer.ID
	key crypto.PrivKey
}

// ID is the peer id.
func (i Identity) ID() peer.ID { return i.id }

// Sign returns the ed25519 signature of msg.
func (i Identity) Sign(msg []byte) ([]byte, error) { return i.key.Sign(msg) }

// PrivateKey is the key, for what is signed outside of this package.
func (i Identity) PrivateKey() ed25519.PrivateKey {
	raw, err := i.key.Raw()
	if err != nil {
		panic(err) // an ed25519 key has raw bytes
	}
	return raw
}

// ed25519ID is how the id of a peer with an ed25519 key begins: an identity multihash
// of 36 bytes, which are the protobuf of key type 1 and a key of 32 bytes.
const ed25519ID = "\x00\x24\x08\x01\x12\x20"

// KeyOf is the public key in the peer id of an ed25519 key. A key has one such id.
func KeyOf(id peer.ID) (key [ed25519.PublicKeySize]byte, err error) {
	if len(id) != len(ed25519ID)+len(key) || string(id[:len(ed25519ID)]) != ed25519ID {
		return key, fmt.Errorf("peer id %s is not of an ed25519 key", id)
	}
	copy(key[:], id[len(ed25519ID):])
	return key, nil
}

// PeerOf is the peer id of an ed25519 key.
func PeerOf(key [ed25519.PublicKeySize]byte) peer.ID { return peer.ID(ed25519ID + string(key[:])) }

// NewIdentity makes a key that is kept nowhere.
func NewIdentity() (Identity, error) {
	key, _, err := crypto.GenerateEd25519Key(rand.Reader)
	if err != nil {
		return Identity{}, fmt.Errorf("generate key: %w", err)
	}
	return identityOf(key)
}

func identityOf(key crypto.PrivKey) (Identity, error) {
	id, err := peer.IDFromPrivateKey(key)
	if err != nil {
		return Identity{}, fmt.Errorf("peer id: %w", err)
	}
	return Identity{id: id, key: key}, nil
}

// LoadOrCreateIdentity reads the key file at path, or creates it, and its folder, with a
// new key. The file holds libp2p's protobuf encoding of an ed25519 private key and has
// mode 0600; one that others may read is refused. Two processes that create the same file
// get the same key.
func LoadOrCreateIdentity(path string) (Identity, error) {
	id, err := loadIdentity(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return id, err
	}
	if err := createIdentity(path); err != nil && !errors.Is(err, fs.ErrExist) {
		return Identity{}, fmt.Errorf("create identity key: %w", err)
	}
	return loadIdentity(path)
}

// CreateIdentity makes a new key in a file of the same kind, which must not be there: its
// error is fs.ErrExist then.
func CreateIdentity(path string) (Identity, error) {
	if _, err := os.Lstat(path); err == nil {
		return Identity{}, fmt.Errorf("create key %s: %w", path, fs.ErrExist)
	}
	if err := createIdentity(path); err != nil {
		return Identity{}, fmt.Errorf("create key: %w", err)
	}
	return loadIdentity(path)
}

// LoadIdentity reads a key file that is there.
func LoadIdentity(path string) (Identity, error) { return loadIdentity(path) }

func loadIdentity(path string) (Identity, error) {
	f, err := os.Open(path)
	if err != nil {
		return Identity{}, fmt.Errorf("identity key: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return Identity{}, fmt.Errorf("identity key: %w", err)
	}
	if !st.Mode().IsRegular() {
		return Identity{}, fmt.Errorf("identity key %s is not a regular file", path)
	}
	// Windows has no such bits: there the folder's access list protects the key.
	if mode := st.Mode().Perm(); mode&0o077 != 0 && runtime.GOOS != "windows" {
		return Identity{}, fmt.Errorf("identity key %s can be used by others (mode %04o): run: chmod 600 %s", path, mode, path)
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return Identity{}, fmt.Errorf("identity key: %w", err)
	}
	if len(raw) > maxKeyFile {
		return Identity{}, fmt.Errorf("identity key %s is larger than %d bytes: this is not a key", path, maxKeyFile)
	}
	return parseIdentity(raw, path)
}

func parseIdentity(raw []byte, path string) (Identity, error) {
	key, err := crypto.UnmarshalPrivateKey(raw)
	if err != nil {
		return Identity{}, fmt.Errorf("identity key %s is damaged (%v): restore it from a backup, or delete it to become a new peer", path, err)
	}
	if key.Type() != crypto.Ed25519 {
		return Identity{}, fmt.Errorf("identity key %s is of type %s, want Ed25519", path, key.Type())
	}
	return identityOf(key)
}

// createIdentity writes a new key beside path and then links it there, so that path is
// never seen half written and an existing key is never replaced.
func createIdentity(path string) error {
	id, err := NewIdentity()
	if err != nil {
		return err
	}
	raw, err := crypto.MarshalPrivateKey(id.key)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(dir, ".identity-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(raw)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	err = os.Link(tmp.Name(), path)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		// Some file systems, Android's among them, have no hard links.
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a new name in dir survive a power loss, where the system can.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
