package toolurl

import (
	"net/url"
	"strings"
)

// raw is the file that a page of GitHub shows: /blob/ is a file, /tree/ a
// folder with a main.py. Every other URL is itself.
func raw(u *url.URL) *url.URL {
	if u.Host != host(GitHub) {
		return u
	}
	// org, repository, blob or tree, branch, path
	parts := strings.SplitN(strings.TrimPrefix(u.EscapedPath(), "/"), "/", 5)
	if len(parts) < 5 || parts[0] == "" || parts[1] == "" || parts[3] == "" || parts[4] == "" {
		return u
	}
	path := parts[4]
	switch parts[2] {
	case "tree":
		path = strings.TrimSuffix(path, "/") + "/main.py"
	case "blob":
	default:
		return u
	}
	at := Raw + "/" + strings.Join([]string{parts[0], parts[1], "refs/heads", parts[3], path}, "/")
	if u.RawQuery != "" && parts[2] == "blob" {
		at += "?" + u.RawQuery
	}
	out, err := url.Parse(at)
	if err != nil {
		return u
	}
	return out
}

// suggested is the name of the tool behind u: its file's, or its folder's when
// the file's says nothing.
func suggested(u *url.URL) string {
	parts := strings.Split(strings.TrimSuffix("https://"+u.Host+u.Path, "/"), "/")
	file := parts[len(parts)-1]
	name, isPython := strings.CutSuffix(file, ".py")
	for _, common := range []string{"main.py", "index.py", "__init__.py"} {
		isPython = isPython && !strings.HasPrefix(file, common)
	}
	if isPython {
		return name
	}
	return parts[len(parts)-2]
}
