package gateway

import (
	"compress/gzip"
	"compress/zlib"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"kvasird/node/gateway/jinja"
)

// Limits on a body. Decoded JSON takes many times its size in memory, so the
// number of its values is bounded, and few large bodies are held at once.
const (
	maxBody   = 32 << 20 // bytes, decoded
	smallBody = 4 << 20  // a body beyond it waits for one of maxLarge places
	maxLarge  = 2
	maxValues = 1 << 20 // of JSON
)

// body reads and decodes a request's JSON object, within its limits of size and
// time. sum is the SHA-256 of the decoded body where something is paid. done gives back
// what the body holds, once the request is prepared.
func (g *Gateway) body(w http.ResponseWriter, r *http.Request) (d *jinja.Dict, sum [sha256.Size]byte, done func(), e *apiError) {
	hold := &held{}
	defer func() {
		if e != nil {
			hold.release()
		}
	}()
	data, e := g.readBody(w, r, hold)
	if e != nil {
		return nil, sum, nil, e
	}
	if !hold.take(r, g.preparing) {
		return nil, sum, nil, clientClosed()
	}
	if g.cfg.Payments != nil {
		sum = sha256.Sum256(data)
	}
	if d, e = decodeObject(data); e != nil {
		return nil, sum, nil, e
	}
	return d, sum, hold.release, nil
}

func clientClosed() *apiError {
	return &apiError{status: statusClientClosed, message: "the client closed the request"}
}

// decodeObject reads one JSON object.
func decodeObject(data []byte) (*jinja.Dict, *apiError) {
	bad := func(reason string) *apiError {
		return &apiError{status: http.StatusBadRequest, code: "invalid_json", message: reason}
	}
	if n := countValues(data); n > maxValues {
		return nil, bad(fmt.Sprintf("the body has more than %d JSON values", maxValues))
	}
	v, err := jinja.DecodeJSON(data)
	if err != nil {
		return nil, bad("the body is not the JSON of a request: " + err.Error())
	}
	d, ok := v.(*jinja.Dict)
	if !ok {
		return nil, bad("the body must be a JSON object, not " + kindOf(v))
	}
	return d, nil
}

// countValues is an upper bound on the values in a JSON text, found without
// decoding it.
func countValues(data []byte) int {
	n, quoted := 1, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == ',' || c == ':' || c == '[' || c == '{'):
			n++
		}
	}
	return n
}

// held is the places that a request took.
type held struct{ places []chan struct{} }

func (h *held) take(r *http.Request, places chan struct{}) bool {
	select {
	case places <- struct{}{}:
		h.places = append(h.places, places)
		return true
	case <-r.Context().Done():
		return false
	}
}

// takeLarge takes a place of those for large bodies, unless the request has one.
func (h *held) takeLarge(r *http.Request, g *Gateway) bool {
	return slices.Contains(h.places, g.large) || h.take(r, g.large)
}

func (h *held) release() {
	for _, p := range h.places {
		<-p
	}
	h.places = nil
}

// readBody reads the decoded bytes of a body.
func (g *Gateway) readBody(w http.ResponseWriter, r *http.Request, hold *held) ([]byte, *apiError) {
	limit := g.waits.body
	rc := http.NewResponseController(w)
	// A recorder in a test has no deadlines; a connection always has.
	_ = rc.SetReadDeadline(time.Now().Add(limit))
	source := &sourceErrors{r: http.MaxBytesReader(w, r.Body, maxBody)}
	data, e := g.decodeBody(r, source, hold)
	var large *http.MaxBytesError
	switch {
	case errors.As(source.err, &large):
		e = tooLarge()
	case source.err != nil:
		w.Header().Set("Connection", "close")
		return nil, &apiError{status: http.StatusRequestTimeout, code: "body_not_read",
			message: fmt.Sprintf("the body did not arrive within %v: %v", limit, source.err)}
	}
	if e != nil && e.status == http.StatusUnsupportedMediaType {
		w.Header().Set("Accept-Encoding", encodings)
	}
	if e == nil { // else what is left of the body must not be waited for
		_ = rc.SetReadDeadline(time.Time{})
	}
	return data, e
}

// sourceErrors keeps a connection's error apart from a decoder's.
type sourceErrors struct {
	r   io.Reader
	err error
}

func (s *sourceErrors) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func tooLarge() *apiError {
	return &apiError{status: http.StatusRequestEntityTooLarge, code: "body_too_large",
		message: fmt.Sprintf("the body is larger than %d bytes", maxBody)}
}

// encodings are those of a body that are undone.
const encodings = "gzip, deflate, zstd"

// decodeBody undoes the Content-Encoding.
func (g *Gateway) decodeBody(r *http.Request, source io.Reader, hold *held) ([]byte, *apiError) {
	encoding := lower(r.Header.Get("Content-Encoding"))
	var err error
	switch encoding {
	case "", "identity", "zstd":
	case "gzip", "x-gzip":
		source, err = gzip.NewReader(source)
	case "deflate":
		source, err = zlib.NewReader(source)
	default:
		return nil, &apiError{status: http.StatusUnsupportedMediaType, code: "unsupported_encoding",
			message: fmt.Sprintf("Content-Encoding %q is not supported; send the body as it is, or in one of %s", clip(encoding), encodings)}
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(source, smallBody))
	}
	if err == nil && len(data) == smallBody {
		if !hold.takeLarge(r, g) {
			return nil, clientClosed()
		}
		var rest []byte
		rest, err = io.ReadAll(io.LimitReader(source, maxBody-smallBody+1))
		data = append(data, rest...)
	}
	switch {
	case err != nil:
		return nil, undecodable(encoding, err)
	case len(data) > maxBody:
		return nil, tooLarge()
	case encoding == "zstd":
		return g.unpackZstd(r, data, hold)
	}
	return data, nil
}

func undecodable(encoding string, err error) *apiError {
	return &apiError{status: http.StatusBadRequest, code: "invalid_encoding",
		message: fmt.Sprintf("the body cannot be decoded as %s: %v", encoding, err)}
}
