package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"

	"kvasird/node/gateway/jinja"
)

// appendJSON writes what jinja.DecodeJSON read, keys in the client's order.
func appendJSON(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, "null"...)
	case bool:
		return strconv.AppendBool(b, v)
	case int64:
		return strconv.AppendInt(b, v, 10)
	case string:
		return appendText(b, v)
	case *jinja.List:
		b = append(b, '[')
		for i, item := range v.Items {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendJSON(b, item)
		}
		return append(b, ']')
	case *jinja.Dict:
		b = append(b, '{')
		for i, key := range v.Keys() {
			if i > 0 {
				b = append(b, ',')
			}
			item, _ := v.Get(key)
			b = appendJSON(append(appendText(b, key), ':'), item)
		}
		return append(b, '}')
	case float64:
		text, err := json.Marshal(v)
		if err == nil {
			return append(b, text...)
		}
	}
	panic(fmt.Sprintf("gateway: %T is no value of JSON", v)) // DecodeJSON makes no other
}

func appendText(b []byte, s string) []byte { return append(b, encode(s)...) }

// encode writes JSON without HTML escapes: templates and clients compare text as
// it is on the wire.
func encode(v any) []byte {
	var buf bytes.Buffer
	e := json.NewEncoder(&buf)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // only strings and our own shapes come here
		panic(err)
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
}

func jsonOf(v any) json.RawMessage { return appendJSON(nil, v) }

// dict makes an ordered object of pairs of key and value; nil values are left out.
func dict(pairs ...any) *jinja.Dict {
	d := jinja.NewDict()
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != nil {
			d.Set(pairs[i].(string), pairs[i+1])
		}
	}
	return d
}
