package grammar

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Limits on a schema, checked while it is read.
const (
	maxSchema = 1 << 20 // bytes
	maxDepth  = 96      // levels of the schema's own JSON
	maxNodes  = 50_000
)

// node is a JSON value that keeps the order of keys, which is the order in
// which properties are asked for.
type node struct {
	id     int
	rank   int    // place among the schemas of a conjunction
	path   string // JSON pointer
	kind   byte   // o a s n t f z: object, array, string, number, true, false, null
	keys   []string
	fields map[string]*node
	items  []*node
	text   string // of a string or a number

	bare   *node   // memo: without what composes schemas
	groups []*node // memo: its anyOf and oneOf, each alone
}

func (n *node) get(key string) *node {
	if n == nil || n.kind != 'o' {
		return nil
	}
	return n.fields[key]
}

// tree reads and owns the nodes of one schema.
type tree struct {
	dec   *json.Decoder
	count int
}

func parseSchema(schema []byte) (*node, *tree, error) {
	t := &tree{}
	if len(bytes.TrimSpace(schema)) == 0 {
		return t.fresh('t', ""), t, nil
	}
	if len(schema) > maxSchema {
		return nil, nil, fmt.Errorf("schema of %d bytes, more than %d", len(schema), maxSchema)
	}
	t.dec = json.NewDecoder(bytes.NewReader(schema))
	t.dec.UseNumber()
	n, err := t.read("", 0)
	if err != nil {
		return nil, nil, fmt.Errorf("schema: %w", err)
	}
	if _, err := t.dec.Token(); err != io.EOF {
		return nil, nil, errors.New("schema: more than one JSON value")
	}
	return n, t, nil
}

func (t *tree) fresh(kind byte, path string) *node {
	t.count++
	return &node{id: t.count, rank: t.count, kind: kind, path: path}
}

func (t *tree) read(path string, depth int) (*node, error) {
	tok, err := t.dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxDepth || t.count > maxNodes {
		return nil, fmt.Errorf("more than %d levels or %d values", maxDepth, maxNodes)
	}
	n := t.fresh('z', path)
	switch v := tok.(type) {
	case json.Delim:
		if v == '{' {
			return n, t.readObject(n, depth)
		}
		return n, t.readArray(n, depth)
	case string:
		n.kind, n.text = 's', v
	case json.Number:
		n.kind, n.text = 'n', v.String()
	case bool:
		n.kind = 'f'
		if v {
			n.kind = 't'
		}
	}
	return n, nil
}

func (t *tree) readObject(n *node, depth int) error {
	n.kind, n.fields = 'o', map[string]*node{}
	for t.dec.More() {
		tok, err := t.dec.Token()
		if err != nil {
			return err
		}
		key, _ := tok.(string)
		child, err := t.read(n.path+"/"+pointerToken(key), depth+1)
		if err != nil {
			return err
		}
		if _, ok := n.fields[key]; !ok {
			n.keys = append(n.keys, key)
		}
		n.fields[key] = child
	}
	_, err := t.dec.Token()
	return err
}

func (t *tree) readArray(n *node, depth int) error {
	n.kind = 'a'
	for t.dec.More() {
		child, err := t.read(n.path+"/"+strconv.Itoa(len(n.items)), depth+1)
		if err != nil {
			return err
		}
		n.items = append(n.items, child)
	}
	_, err := t.dec.Token()
	return err
}

var pointerEscape = strings.NewReplacer("~", "~0", "/", "~1")
var pointerUnescape = strings.NewReplacer("~1", "/", "~0", "~")

func pointerToken(key string) string { return pointerEscape.Replace(key) }

// at follows a JSON pointer; nil when there is nothing.
func (n *node) at(pointer string) *node {
	for pointer != "" && n != nil {
		var tok string
		tok, pointer, _ = strings.Cut(strings.TrimPrefix(pointer, "/"), "/")
		if pointer != "" {
			pointer = "/" + pointer
		}
		tok = pointerUnescape.Replace(tok)
		if n.kind == 'a' {
			i, err := strconv.Atoi(tok)
			if err != nil || i < 0 || i >= len(n.items) {
				return nil
			}
			n = n.items[i]
			continue
		}
		n = n.get(tok)
	}
	return n
}

// encode writes the value as compact JSON.
func (n *node) encode(b *strings.Builder) {
	switch n.kind {
	case 'o':
		b.WriteByte('{')
		for i, k := range n.keys {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(quote(k))
			b.WriteByte(':')
			n.fields[k].encode(b)
		}
		b.WriteByte('}')
	case 'a':
		b.WriteByte('[')
		for i, c := range n.items {
			if i > 0 {
				b.WriteByte(',')
			}
			c.encode(b)
		}
		b.WriteByte(']')
	case 's':
		b.WriteString(quote(n.text))
	case 'n':
		b.WriteString(n.text)
	default:
		b.WriteString(map[byte]string{'t': "true", 'f': "false", 'z': "null"}[n.kind])
	}
}

// quote writes a JSON string as models write it: no escapes but the needed ones.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always encodes
	return strings.TrimSuffix(b.String(), "\n")
}
