package draft

const (
	// A match has ShortestMatch to longestMatch tokens.
	ShortestMatch = 2
	longestMatch  = 5
	// Matches are the lengths of a match: length - ShortestMatch is below.
	Matches = longestMatch - ShortestMatch + 1
	// lookBack bounds the tokens that are searched.
	lookBack = 1 << 14
)

// LookUp finds the latest earlier place where the last tokens stood, the longest match first, and
// returns the position behind it and the tokens that match; 0, 0 if there is none.
func LookUp[T ~int32](tokens []T) (at, length int) {
	end := len(tokens)
	for i := end - 1; i >= ShortestMatch && i >= end-lookBack; i-- { // the match ends before i
		n := 0
		for n < longestMatch && n < i && tokens[i-1-n] == tokens[end-1-n] {
			n++
		}
		if n >= ShortestMatch && n > length {
			at, length = i, n
			if n == longestMatch {
				break
			}
		}
	}
	return at, length
}

// Follow appends the k tokens that stood at a place of tokens to list. Where these are at their end
// the text goes on as it repeats itself, with a period of len(tokens)-at.
func Follow[T ~int32](list, tokens []T, at, k int) []T {
	from := len(list)
	for i := range k {
		if at+i < len(tokens) {
			list = append(list, tokens[at+i])
		} else {
			list = append(list, list[from+at+i-len(tokens)])
		}
	}
	return list
}
