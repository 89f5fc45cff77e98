package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxJSONDepth bounds nested arrays and objects in DecodeJSON.
const maxJSONDepth = 64

// DecodeJSON reads one JSON value and nothing after it. Objects become *Dict in
// the order of the text, arrays *List, whole numbers int64, others float64.
// Nesting beyond 64 and an object that has a key twice are errors.
func DecodeJSON(data []byte) (any, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("JSON is not valid UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	v, err := decodeValue(d, 0)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("JSON has text after its end")
	}
	return v, nil
}

func decodeValue(d *json.Decoder, depth int) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch t := t.(type) {
	case json.Number:
		return decodeNumber(t)
	case json.Delim:
		if depth++; depth > maxJSONDepth {
			return nil, fmt.Errorf("JSON is nested deeper than %d", maxJSONDepth)
		}
		if t == '{' {
			return decodeObject(d, depth)
		}
		return decodeArray(d, depth)
	}
	return t, nil
}

func decodeNumber(n json.Number) (any, error) {
	if i, err := strconv.ParseInt(n.String(), 10, 64); err == nil {
		return i, nil
	}
	f, err := n.Float64()
	if err != nil {
		return nil, fmt.Errorf("JSON number %.20s… is out of range", n)
	}
	return f, nil
}

func decodeObject(d *json.Decoder, depth int) (any, error) {
	o := NewDict()
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		v, err := decodeValue(d, depth)
		if err != nil {
			return nil, err
		}
		if _, twice := o.Get(key.(string)); twice {
			return nil, fmt.Errorf("JSON object has the key %.64q twice", key)
		}
		o.Set(key.(string), v)
	}
	_, err := d.Token()
	return o, err
}

func decodeArray(d *json.Decoder, depth int) (any, error) {
	l := &List{}
	for d.More() {
		v, err := decodeValue(d, depth)
		if err != nil {
			return nil, err
		}
		l.Items = append(l.Items, v)
	}
	_, err := d.Token()
	return l, err
}

func fromjson(r *run, v any, _ arguments) any {
	s := r.str(v)
	r.alloc(32 * len(s))
	out, err := DecodeJSON([]byte(s))
	if err != nil {
		r.fail("fromjson: %v", err)
	}
	return out
}

// jsonStyle is how Python's json.dumps was asked to write.
type jsonStyle struct {
	ascii      bool
	sortKeys   bool
	item, pair string
	indent     string // with newlines when pretty
	pretty     bool
}

// tojson is json.dumps with ensure_ascii off.
func tojson(r *run, v any, a arguments) any {
	st := jsonStyle{item: ", ", pair: ": "}
	st.ascii = truthy(a.arg(0, "ensure_ascii", false))
	st.sortKeys = truthy(a.arg(3, "sort_keys", false))
	if width := a.arg(1, "indent", nil); width != nil {
		st.pretty, st.item = true, ","
		var isText bool
		if st.indent, isText = width.(string); !isText {
			st.indent, _ = r.repeat(" ", width, width).(string)
		}
	}
	if seps := a.arg(2, "separators", nil); seps != nil {
		pair := r.iterate(seps)
		if len(pair) != 2 {
			r.fail("tojson: separators are two texts")
		}
		st.item, st.pair = r.str(pair[0]), r.str(pair[1])
	}
	var b strings.Builder
	r.writeJSON(&b, v, st, "")
	return b.String()
}

// writeJSON writes v; lead is the indentation of the enclosing line.
func (r *run) writeJSON(b *strings.Builder, v any, st jsonStyle, lead string) {
	r.enter()
	defer r.leave()
	switch v := v.(type) {
	case nil:
		r.put(b, "null")
	case bool, int64:
		r.put(b, fmt.Sprint(v))
	case float64:
		r.put(b, map[string]string{"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[floatText(v)])
		if v-v == 0 {
			r.put(b, floatText(v))
		}
	case string:
		r.jsonString(b, v, st.ascii)
	case *List:
		r.jsonBlock(b, "[", "]", len(v.Items), st, lead, func(i int, lead string) {
			r.writeJSON(b, v.Items[i], st, lead)
		})
	case *Dict:
		keys := v.keys
		if st.sortKeys {
			keys = r.sorted(keys, keys, false)
		}
		r.jsonBlock(b, "{", "}", len(keys), st, lead, func(i int, lead string) {
			r.jsonString(b, r.str(keys[i]), st.ascii)
			r.put(b, st.pair)
			r.writeJSON(b, v.vals[keys[i]], st, lead)
		})
	default:
		r.fail("tojson cannot write %s", describe(v))
	}
}

// jsonBlock writes n items between brackets, each on its line when pretty.
func (r *run) jsonBlock(b *strings.Builder, open, end string, n int, st jsonStyle, lead string, item func(int, string)) {
	r.put(b, open)
	inner := lead
	if st.pretty && n > 0 {
		inner = r.concat(lead, st.indent)
	}
	for i := range n {
		if i > 0 {
			r.put(b, st.item)
		}
		if st.pretty {
			r.put(b, "\n")
			r.put(b, inner)
		}
		item(i, inner)
	}
	if st.pretty && n > 0 {
		r.put(b, "\n")
		r.put(b, lead)
	}
	r.put(b, end)
}

var jsonEscapes = map[rune]string{
	'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`, '\f': `\f`,
}

func (r *run) jsonString(b *strings.Builder, s string, ascii bool) {
	r.alloc(2 * len(s))
	b.WriteByte('"')
	for _, c := range s {
		switch esc, ok := jsonEscapes[c]; {
		case ok:
			b.WriteString(esc)
		case c < 0x20 || ascii && c >= 0x7f && c < 0x10000:
			fmt.Fprintf(b, `\u%04x`, c)
		case ascii && c >= 0x10000:
			fmt.Fprintf(b, `\u%04x\u%04x`, 0xd800+(c-0x10000)>>10, 0xdc00+(c-0x10000)&0x3ff)
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
}
