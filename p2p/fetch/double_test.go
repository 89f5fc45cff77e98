package fetch

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"kvasird/p2p"

	"github.com/libp2p/go-libp2p/core/peer"
	"lukechampine.com/blake3"
	"lukechampine.com/blake3/bao"
)

const baoGroup = 8 // 2^8 chunks of 1 KiB: Group

// model is a whole model in memory: what is true.
type model struct {
	id    [32]byte
	files []File
	data  [][]byte
	trees [][]byte
}

func makeModel(seed uint64, sizes ...int) *model {
	rng := rand.NewChaCha8([32]byte{byte(seed)})
	m := &model{}
	for _, size := range sizes {
		data := make([]byte, size)
		rng.Read(data)
		tree, root := bao.EncodeBuf(data, baoGroup, true)
		m.data, m.trees = append(m.data, data), append(m.trees, tree)
		m.files = append(m.files, File{root, int64(size)})
	}
	m.id = modelID(m.files)
	return m
}

func modelID(files []File) [32]byte { return blake3.Sum256(encodeManifest(files)) }

func verifyManifest(model [32]byte, files []File) error {
	if modelID(files) != model {
		return errors.New("the files do not hash to the model id")
	}
	return nil
}

func (m *model) Shelf(id [32]byte) Shelf {
	if id != m.id {
		return nil
	}
	return m.full()
}

// full is a shelf with everything on it.
func (m *model) full() *wholeShelf { return &wholeShelf{m} }

// wholeShelf serves a model that is complete.
type wholeShelf struct{ m *model }

func (s *wholeShelf) Files() []File           { return s.m.files }
func (s *wholeShelf) TreeSize(file int) int64 { return int64(len(s.m.trees[file])) }
func (s *wholeShelf) Held(file int) []Span    { return []Span{{0, s.m.files[file].Size}} }
func (s *wholeShelf) ReadTree(file int, p []byte, off int64) (int, error) {
	return copy(p, s.m.trees[file][off:]), nil
}
func (s *wholeShelf) ReadAt(file int, p []byte, off int64) (int, error) {
	return copy(p, s.m.data[file][off:]), nil
}

// wrong is a fault of the source, as a sink tells it.
type wrong struct{ what string }

func (w wrong) Error() string { return w.what }
func (w wrong) Wrong() bool   { return true }

// judge is a sink in memory that verifies what it gets with Bao, and fails the test when it
// is used otherwise than Sink says.
type judge struct {
	t testing.TB
	m *model // the truth, for check

	mu     sync.Mutex
	trees  [][]byte
	data   [][]byte
	held   [][]Span
	again  int64 // bytes that were written though they were held
	refuse error // local fault of the next write
	wrote  func()
	space  store // nil: data
}

// store is where the bytes of verified groups go.
type store interface {
	WriteAt(p []byte, off int64) (int, error)
}

func newJudge(t testing.TB, m *model) *judge {
	s := &judge{t: t, m: m, held: make([][]Span, len(m.files)), trees: make([][]byte, len(m.files))}
	for _, f := range m.files {
		s.data = append(s.data, make([]byte, f.Size))
	}
	return s
}

func (s *judge) Files() []File { return s.m.files }
func (s *judge) TreeSize(file int) int64 {
	return int64(bao.EncodedSize(int(s.m.files[file].Size), baoGroup, true))
}

func (s *judge) HasTree(file int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trees[file] != nil
}

func (s *judge) ReadTree(file int, p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.trees[file] == nil {
		return 0, errors.New("no tree")
	}
	return copy(p, s.trees[file][off:]), nil
}

func (s *judge) Held(file int) []Span {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Span(nil), s.held[file]...)
}

func (s *judge) ReadAt(file int, p []byte, off int64) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !covers(s.held[file], Span{off, int64(len(p))}) {
		return 0, errors.New("not held")
	}
	return copy(p, s.data[file][off:]), nil
}

// SetTree is strict as a store is: the tree must be the file's.
func (s *judge) SetTree(file int, tree []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !bytes.Equal(tree, s.m.trees[file]) {
		return wrong{fmt.Sprintf("tree of file %d", file)}
	}
	s.trees[file] = bytes.Clone(tree)
	return nil
}

func (s *judge) WriteGroups(file int, off int64, data []byte) error {
	size := s.m.files[file].Size
	end := off + int64(len(data))
	if len(data) == 0 || off%Group != 0 || end%Group != 0 && end != size {
		s.t.Errorf("written to file %d: %d bytes at %d", file, len(data), off)
	}
	s.mu.Lock()
	tree, refuse := s.trees[file], s.refuse
	s.mu.Unlock()
	if tree == nil {
		s.t.Errorf("written to file %d before its tree", file)
	}
	if !bao.VerifyChunk(data, tree, baoGroup, uint64(off), s.m.files[file].Root) {
		return wrong{fmt.Sprintf("data of file %d at %d", file, off)}
	}
	if refuse != nil {
		return refuse
	}
	if s.space != nil {
		if _, err := s.space.WriteAt(data, off); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.space == nil {
		copy(s.data[file][off:], data)
	}
	before := sum(s.held[file])
	s.held[file] = merge(append(s.held[file], Span{off, int64(len(data))}))
	s.again += int64(len(data)) - (sum(s.held[file]) - before)
	if s.wrote != nil {
		s.wrote()
	}
	return nil
}

func (s *judge) bytes() (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, held := range s.held {
		n += sum(held)
	}
	return n
}

// check fails the test when a byte that counts as held is not the model's, or spans are not
// held. Nil stands for everything.
func (s *judge) check(spans map[int][]Span) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for file, held := range s.held {
		for _, span := range held {
			if !bytes.Equal(s.data[file][span.Off:span.End()], s.m.data[file][span.Off:span.End()]) {
				s.t.Errorf("file %d: wrong bytes are held in %v", file, span)
			}
		}
		want := []Span{{0, s.m.files[file].Size}}
		if spans != nil {
			want = align(spans[file], s.m.files[file].Size)
		}
		if missing := subtract(want, held); len(missing) > 0 {
			s.t.Errorf("file %d: missing %v", file, missing)
		}
	}
}

// pipeConn is one end of a net.Pipe as a Conn.
type pipeConn struct {
	net.Conn
	remote peer.ID
	lane   bool
	write  func(c net.Conn, b []byte) (int, error) // nil: Conn.Write
}

func (c *pipeConn) Remote() peer.ID { return c.remote }
func (c *pipeConn) Lane() bool      { return c.lane }
func (c *pipeConn) Write(b []byte) (int, error) {
	if c.write == nil {
		return c.Conn.Write(b)
	}
	return c.write(c.Conn, b)
}

// pipeSource is a source that a function serves, over a pipe.
type pipeSource struct {
	id    string
	serve func(ctx context.Context, c *pipeConn)

	mu    sync.Mutex
	down  bool // can not be opened
	opens int
	conns []net.Conn
	wg    sync.WaitGroup
}

func (s *pipeSource) ID() string { return s.id }

func (s *pipeSource) Open(context.Context) (p2p.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opens++
	if s.down {
		return nil, errors.New("connection refused")
	}
	near, far := net.Pipe()
	s.conns = append(s.conns, far)
	s.wg.Go(func() {
		defer far.Close()
		s.serve(context.Background(), &pipeConn{Conn: far, remote: peer.ID("requester"), lane: true})
	})
	return &pipeConn{Conn: near, remote: peer.ID(s.id), lane: true}, nil
}

// setDown kills the source, or has it return.
func (s *pipeSource) setDown(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
	if down {
		for _, c := range s.conns {
			c.Close()
		}
	}
}

// honest is a source with a server of its own.
func honest(id string, cfg ServerConfig) *pipeSource {
	srv := NewServer(cfg)
	return &pipeSource{id: id, serve: func(ctx context.Context, c *pipeConn) { srv.Serve(ctx, c) }}
}

// tampering is a source whose server is honest, but each of its frames goes through change:
// nil swallows it.
func tampering(id string, lib Library, change func(frame []byte) []byte) *pipeSource {
	srv := NewServer(ServerConfig{Library: lib})
	return &pipeSource{id: id, serve: func(ctx context.Context, c *pipeConn) {
		c.write = func(nc net.Conn, b []byte) (int, error) {
			out := change(bytes.Clone(b))
			if out == nil {
				return len(b), nil
			}
			if _, err := nc.Write(out); err != nil {
				return 0, err
			}
			return len(b), nil
		}
		srv.Serve(ctx, c)
	}}
}

// frame builds a frame.
func frame(typ, flags uint8, id uint64, payload []byte) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	b = append(b, typ, flags, 0, 0)
	return append(binary.LittleEndian.AppendUint64(b, id), payload...)
}

// blames collects what a client says of sources.
type blames struct {
	mu  sync.Mutex
	all []*BadSourceError
}

func (b *blames) add(e *BadSourceError) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, e)
}

func (b *blames) of(source string) (faults []Fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, e := range b.all {
		if e.Source == source {
			faults = append(faults, e.Fault)
		}
	}
	return faults
}

func these(sources ...Source) func() []Source { return func() []Source { return sources } }

const patience = 30 * time.Second
