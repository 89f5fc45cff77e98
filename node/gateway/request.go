package gateway

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"kvasird/node/gateway/jinja"
)

// Limits on single fields.
const (
	maxStops     = 16
	maxStopBytes = 512
	maxBias      = 1024
	maxTokens    = math.MaxInt32
	maxMessages  = 10_000
)

// chatRequest is a checked body of /v1/chat/completions. Its messages and
// template arguments keep the client's key order.
type chatRequest struct {
	model        string
	messages     []any // *jinja.Dict each
	templateArgs *jinja.Dict
	stream       bool
	includeUsage bool
	stops        []string
	seed         *uint32 // nil: any
	sampling     Request
}

// refused are the fields that would change the answer if they were obeyed, and
// that are not. Any other unknown field is ignored.
var refused = []string{
	"tools", "functions", "function_call", "logprobs", "top_logprobs", "audio", "web_search_options",
	"grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
	"best_of", "echo", "suffix", "ignore_eos", "min_tokens", "stop_token_ids", "use_beam_search",
	"mirostat", "dry_multiplier", "xtc_probability",
}

// parseChat reads a body. Every error is a 4xx that names the field.
func parseChat(body []byte) (*chatRequest, *apiError) {
	v, err := jinja.DecodeJSON(body)
	if err != nil {
		return nil, &apiError{status: 400, code: "invalid_json", message: "the body is not the JSON of a request: " + err.Error()}
	}
	d, ok := v.(*jinja.Dict)
	if !ok {
		return nil, &apiError{status: 400, code: "invalid_json", message: "the body must be a JSON object, not " + kindOf(v)}
	}
	f := &fields{d: d}
	q := &chatRequest{}
	if q.model, ok = f.text("model"); !ok || q.model == "" {
		f.fail("model", "is required; GET /v1/models lists what is served")
	}
	f.refuseUnsupported()
	f.sampling(q)
	f.streaming(q)
	q.seed = f.seed()
	q.stops = f.stops()
	q.templateArgs = f.templateArgs()
	q.messages = f.messages()
	if f.err != nil {
		return nil, f.err
	}
	return q, nil
}

func (f *fields) refuseUnsupported() {
	for _, name := range refused {
		if v, _ := f.d.Get(name); !harmless(v) {
			f.fail(name, "is not supported")
		}
	}
	if n, ok := f.whole("n", 1, 128); ok && n != 1 {
		f.fail("n", "only one answer at a time is supported, not %d", n)
	}
	switch v, ok := f.get("tool_choice"); {
	case !ok, v == "none", v == "auto": // without tools they mean the same
	default:
		f.fail("tool_choice", "tools are not supported")
	}
	if format, ok := f.object("response_format"); ok {
		if kind, _ := format.Get("type"); kind != "text" {
			f.fail("response_format", "only the type \"text\" is supported")
		}
	}
	if v, ok := f.get("modalities"); ok {
		if l, isList := v.(*jinja.List); !isList || slices.ContainsFunc(l.Items, func(m any) bool { return m != "text" }) {
			f.fail("modalities", "only [\"text\"] is supported")
		}
	}
}

func (f *fields) sampling(q *chatRequest) {
	r := &q.sampling
	n, ok := f.whole("max_completion_tokens", 1, maxTokens)
	if old, given := f.whole("max_tokens", 1, maxTokens); given && !ok {
		n = old
	}
	r.MaxTokens = int(n)
	r.Temperature = f.number("temperature", 0, 2, 1)
	r.TopP = f.number("top_p", 0, 1, 1)
	if r.TopP == 0 { // the smallest nucleus is the likeliest token
		r.TopP, r.Temperature = 1, 0
	}
	k, _ := f.whole("top_k", -1, math.MaxInt32)
	r.TopK = int(max(k, 0))
	r.MinP = f.number("min_p", 0, 1, 0)
	r.FrequencyPenalty = f.number("frequency_penalty", -2, 2, 0)
	r.PresencePenalty = f.number("presence_penalty", -2, 2, 0)
	r.RepeatPenalty = f.number("repetition_penalty", 0.01, 10, 1)
	if _, ok := f.get("repeat_penalty"); ok {
		r.RepeatPenalty = f.number("repeat_penalty", 0.01, 10, 1)
	}
	r.LogitBias = f.logitBias()
}

// seed folds the request's seed to 32 bits.
func (f *fields) seed() *uint32 {
	s, ok := f.whole("seed", math.MinInt64, math.MaxInt64)
	if !ok {
		return nil
	}
	folded := uint32(s) ^ uint32(s>>32)
	return &folded
}

func (f *fields) logitBias() map[int32]float32 {
	d, ok := f.object("logit_bias")
	if !ok {
		return nil
	}
	keys := d.Keys()
	if len(keys) > maxBias {
		f.fail("logit_bias", "has %d entries, at most %d are taken", len(keys), maxBias)
		return nil
	}
	bias := make(map[int32]float32, len(keys))
	for _, key := range keys {
		id, err := strconv.ParseInt(key, 10, 32)
		v, _ := d.Get(key)
		b, ok := asFloat(v)
		if err != nil || id < 0 || !ok || b < -100 || b > 100 {
			f.fail("logit_bias", "%q must be a token id with a number between -100 and 100", clip(key))
			return nil
		}
		bias[int32(id)] = float32(b)
	}
	return bias
}

func (f *fields) streaming(q *chatRequest) {
	q.stream = f.flag("stream")
	options, ok := f.object("stream_options")
	if !ok {
		return
	}
	if !q.stream {
		f.fail("stream_options", "is only for stream: true")
	}
	o := &fields{d: options}
	if q.includeUsage = o.flag("include_usage"); o.err != nil {
		f.fail("stream_options", "%s", o.err.message)
	}
}

func (f *fields) stops() []string {
	v, ok := f.get("stop")
	if !ok {
		return nil
	}
	list := []any{v}
	if l, ok := v.(*jinja.List); ok {
		list = l.Items
	}
	if len(list) > maxStops {
		f.fail("stop", "has %d strings, at most %d are taken", len(list), maxStops)
		return nil
	}
	var stops []string
	for _, v := range list {
		s, ok := v.(string)
		if !ok || s == "" || len(s) > maxStopBytes {
			f.fail("stop", "must be one string or several, each of 1 to %d bytes", maxStopBytes)
			return nil
		}
		stops = append(stops, s)
	}
	return stops
}

// templateArgs are the switches that some templates have.
func (f *fields) templateArgs() *jinja.Dict {
	args := jinja.NewDict()
	if d, ok := f.object("chat_template_kwargs"); ok {
		for _, k := range d.Keys() {
			v, _ := d.Get(k)
			args.Set(k, v)
		}
	}
	if effort, ok := f.text("reasoning_effort"); ok {
		args.Set("reasoning_effort", effort)
	}
	return args
}

func (f *fields) messages() []any {
	v, _ := f.get("messages")
	l, ok := v.(*jinja.List)
	if !ok || len(l.Items) == 0 || len(l.Items) > maxMessages {
		f.fail("messages", "must be an array of 1 to %d messages", maxMessages)
		return nil
	}
	out := make([]any, len(l.Items))
	for i, v := range l.Items {
		d, ok := v.(*jinja.Dict)
		if !ok {
			f.fail(fmt.Sprintf("messages[%d]", i), "must be an object, not %s", kindOf(v))
			return nil
		}
		out[i] = f.message(d, fmt.Sprintf("messages[%d].", i))
	}
	return out
}

// message checks one message and returns it with its content as one string.
func (f *fields) message(d *jinja.Dict, path string) *jinja.Dict {
	out := jinja.NewDict()
	m := &fields{d: d}
	role, _ := m.text("role")
	switch role {
	case "system", "user", "assistant":
	case "developer": // the newer name of system, which templates do not know
		role = "system"
	case "tool", "function":
		f.fail(path+"role", "tool results are not supported")
	default:
		f.fail(path+"role", "%q is none of system, developer, user, assistant", clip(role))
	}
	for _, name := range []string{"tool_calls", "function_call", "audio"} {
		if v, _ := d.Get(name); !harmless(v) {
			f.fail(path+name, "is not supported")
		}
	}
	for _, k := range d.Keys() {
		switch v, _ := d.Get(k); k {
		case "role":
			out.Set(k, role)
		case "content":
			out.Set(k, f.content(v, path+"content", role))
		case "tool_calls", "function_call", "audio":
		default:
			out.Set(k, v)
		}
	}
	if _, ok := out.Get("content"); !ok {
		out.Set("content", f.content(nil, path+"content", role))
	}
	return out
}

// content joins text parts. An assistant's turn may have none.
func (f *fields) content(v any, param, role string) string {
	switch v := v.(type) {
	case string:
		return v
	case nil:
		if role == "assistant" {
			return ""
		}
		f.fail(param, "is required")
	case *jinja.List:
		text := ""
		for i, part := range v.Items {
			text += f.part(part, fmt.Sprintf("%s[%d]", param, i))
		}
		return text
	default:
		f.fail(param, "must be a string or an array of parts, not %s", kindOf(v))
	}
	return ""
}

func (f *fields) part(v any, param string) string {
	d, ok := v.(*jinja.Dict)
	if !ok {
		f.fail(param, "must be an object, not %s", kindOf(v))
		return ""
	}
	p := &fields{d: d}
	if kind, _ := p.text("type"); kind != "text" {
		f.fail(param+".type", "only \"text\" parts are supported, not %q", clip(kind))
		return ""
	}
	text, ok := p.text("text")
	if !ok {
		f.fail(param+".text", "must be a string")
	}
	return text
}
