package node

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A log file is rotated before it grows over maxLogFile bytes; logFiles files
// are kept in all: name, name.1, … from new to old.
const (
	maxLogFile = 16 << 20
	logFiles   = 4
)

// Log is a logger with the file behind it.
type Log struct {
	*slog.Logger
	file *rotatingFile // nil: no file
}

// OpenLog starts logging: for people to stderr when it is a terminal, as JSON
// lines to the file when one is named, and as JSON lines to stderr when there
// is neither, as under a service manager.
func OpenLog(cfg LogSettings, stderr *os.File) (*Log, error) {
	level, err := cfg.level()
	if err != nil {
		return nil, err
	}
	opts := &slog.HandlerOptions{Level: level}
	l := new(Log)
	var handlers []slog.Handler
	terminal := isTerminal(stderr)
	if terminal {
		handlers = append(handlers, newHumanHandler(stderr, level))
	}
	if cfg.File != "" {
		if l.file, err = openRotating(cfg.File, maxLogFile, logFiles); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
		handlers = append(handlers, slog.NewJSONHandler(l.file, opts))
	} else if !terminal {
		handlers = append(handlers, slog.NewJSONHandler(stderr, opts))
	}
	l.Logger = slog.New(slog.NewMultiHandler(handlers...))
	return l, nil
}

// Close closes the file. Lines logged afterwards go to the terminal only.
func (l *Log) Close() error {
	if l.file == nil {
		return nil
	}
	return l.file.Close()
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// humanHandler writes one line for people: time, level unless it is info, the
// message, the attributes as key=value. What a peer or file put into an
// attribute is quoted by slog's text handler, so it cannot steer a terminal.
type humanHandler struct {
	attrs slog.Handler // writes the attributes alone to out.buf
	out   *humanOutput
}

// humanOutput is shared by all handlers made from one.
type humanOutput struct {
	mu  sync.Mutex // guards buf and w
	buf bytes.Buffer
	w   io.Writer
}

func newHumanHandler(w io.Writer, level slog.Level) *humanHandler {
	out := &humanOutput{w: w}
	attrsOnly := func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && slices.Contains([]string{slog.TimeKey, slog.LevelKey, slog.MessageKey}, a.Key) {
			return slog.Attr{}
		}
		return a
	}
	text := slog.NewTextHandler(&out.buf, &slog.HandlerOptions{Level: level, ReplaceAttr: attrsOnly})
	return &humanHandler{attrs: text, out: out}
}

func (h *humanHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.attrs.Enabled(ctx, l)
}

func (h *humanHandler) WithAttrs(as []slog.Attr) slog.Handler {
	return &humanHandler{h.attrs.WithAttrs(as), h.out}
}

func (h *humanHandler) WithGroup(name string) slog.Handler {
	return &humanHandler{h.attrs.WithGroup(name), h.out}
}

func (h *humanHandler) Handle(ctx context.Context, r slog.Record) error {
	h.out.mu.Lock()
	defer h.out.mu.Unlock()
	h.out.buf.Reset()
	if err := h.attrs.Handle(ctx, r); err != nil {
		return err
	}
	head := r.Time.Format(time.TimeOnly) + " "
	if r.Level != slog.LevelInfo {
		head += r.Level.String() + " "
	}
	line := head + r.Message
	if attrs := strings.TrimSpace(h.out.buf.String()); attrs != "" {
		line += "  " + attrs
	}
	_, err := io.WriteString(h.out.w, line+"\n")
	return err
}

// rotatingFile is a log file of bounded size. Safe for concurrent use.
type rotatingFile struct {
	path  string
	limit int64
	keep  int

	mu   sync.Mutex // guards the rest
	f    *os.File   // nil once closed
	size int64
}

func openRotating(path string, limit int64, keep int) (*rotatingFile, error) {
	r := &rotatingFile{path: path, limit: limit, keep: keep}
	return r, r.openLocked()
}

func (r *rotatingFile) openLocked() error {
	f, err := os.OpenFile(r.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return err
	}
	r.f, r.size = f, info.Size()
	return nil
}

// Write appends one line, whole, rotating first when it does not fit.
func (r *rotatingFile) Write(line []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.f == nil {
		return 0, os.ErrClosed
	}
	if r.size > 0 && r.size+int64(len(line)) > r.limit {
		if err := r.rotateLocked(); err != nil {
			return 0, err
		}
	}
	n, err := r.f.Write(line)
	r.size += int64(n)
	return n, err
}

// rotateLocked moves each file one number up; the oldest is overwritten.
func (r *rotatingFile) rotateLocked() error {
	err := r.f.Close()
	r.f = nil
	if err != nil {
		return err
	}
	name := func(i int) string {
		if i == 0 {
			return r.path
		}
		return r.path + "." + strconv.Itoa(i)
	}
	for i := r.keep - 1; i > 0; i-- {
		if err := os.Rename(name(i-1), name(i)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return r.openLocked()
}

func (r *rotatingFile) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.f == nil {
		return nil
	}
	f := r.f
	r.f = nil
	return f.Close()
}
