package gateway

import (
	"math"
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
	maxParts     = 10_000
	maxChoices   = 8
	maxTop       = 20
)

// refused are the fields that would change the answer if they were obeyed, and
// that are not. Any other unknown field is ignored.
var refused = []string{
	"audio", "web_search_options",
	"grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
	"ignore_eos", "min_tokens", "stop_token_ids", "use_beam_search",
	"mirostat", "dry_multiplier", "xtc_probability",
}

func (f *fields) refuse(names ...string) {
	for _, name := range names {
		if v, _ := f.d.Get(name); !harmless(v) {
			f.fail(name, "is not supported")
		}
	}
}

// nucleus reads temperature, top_p and top_k, which every API has.
func (f *fields) nucleus(r *Request) {
	r.Temperature = f.number("temperature", 0, 2, 1)
	r.TopP = f.number("top_p", 0, 1, 1)
	if r.TopP == 0 { // the smallest nucleus is the likeliest token
		r.TopP, r.Temperature = 1, 0
	}
	k, _ := f.whole("top_k", -1, math.MaxInt32)
	r.TopK = int(max(k, 0))
	r.RepeatPenalty = 1
}

// sampling reads what OpenAI's completions have beyond it, with the usual
// extensions.
func (f *fields) sampling(r *Request) {
	f.nucleus(r)
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
	o, ok := f.object("logit_bias")
	if !ok {
		return nil
	}
	keys := o.d.Keys()
	if len(keys) > maxBias {
		f.fail("logit_bias", "has %d entries, at most %d are taken", len(keys), maxBias)
		return nil
	}
	bias := make(map[int32]float32, len(keys))
	for _, key := range keys {
		id, err := strconv.ParseInt(key, 10, 32)
		v, _ := o.d.Get(key)
		b, ok := asFloat(v)
		if err != nil || id < 0 || !ok || b < -100 || b > 100 {
			f.fail("logit_bias", "%q must be a token id with a number between -100 and 100", clip(key))
			return nil
		}
		bias[int32(id)] = float32(b)
	}
	return bias
}

// choices is n, at most maxChoices.
func (f *fields) choices() int {
	n, ok := f.whole("n", 1, maxChoices)
	if !ok {
		return 1
	}
	return int(n)
}

func (f *fields) streaming(t *task) {
	t.stream = f.flag("stream")
	options, ok := f.object("stream_options")
	if !ok {
		return
	}
	if !t.stream {
		f.fail("stream_options", "is only for stream: true")
	}
	t.includeUsage = options.flag("include_usage")
}

// stops reads stop strings: one or several.
func (f *fields) stops(name string) []string {
	v, ok := f.get(name)
	if !ok {
		return nil
	}
	list := []any{v}
	if l, ok := v.(*jinja.List); ok {
		list = l.Items
	}
	if len(list) > maxStops {
		f.fail(name, "has %d strings, at most %d are taken", len(list), maxStops)
		return nil
	}
	var stops []string
	for _, v := range list {
		s, ok := v.(string)
		if !ok || s == "" || len(s) > maxStopBytes {
			f.fail(name, "must be one string or several, each of 1 to %d bytes", maxStopBytes)
			return nil
		}
		stops = append(stops, s)
	}
	return stops
}
