//! `#[entry_points]`: each function that Python can call runs in a guard, by the name that Python
//! calls it by.
//!
//! A name that is typed by hand can be another function's, and a function can forget its guard.
//! `tests/panics` reads the attributes and finds those that have none.

use proc_macro::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream, TokenTree};

/// Guards the methods of a class, `#[entry_points(Class)]` above `#[pymethods]`, or a function,
/// `#[entry_points]` above `#[pyfunction]`.
///
/// A body runs in `crate::guard::enter`. That of a method with `#[by(guard)]` runs in `self.guard`,
/// which gets the name and a closure over `self`: for calls after whose panic something has to be
/// done.
///
/// # Panics
/// If it is above something else, and for a setter that doesn't name its field: the build fails.
#[proc_macro_attribute]
pub fn entry_points(class: TokenStream, item: TokenStream) -> TokenStream {
    let class = class.to_string();
    if class.is_empty() {
        return guard_functions("", item);
    }
    let mut item: Vec<TokenTree> = item.into_iter().collect();
    let Some(TokenTree::Group(methods)) = item.pop() else {
        panic!("#[entry_points(Class)] belongs above an impl block");
    };
    item.push(group(Delimiter::Brace, guard_functions(&format!("{class}."), methods.stream())));
    item.into_iter().collect()
}

/// What is known of a function before its body comes.
#[derive(Default)]
struct Function {
    /// The name that Python has for it, unless it is that of the function.
    python_name: Option<String>,
    name: Option<String>,
    guard: Option<Ident>,
}

fn guard_functions(prefix: &str, items: TokenStream) -> TokenStream {
    let mut guarded = Vec::new();
    let mut function = Function::default();
    let mut tokens = items.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match (&token, tokens.peek()) {
            (TokenTree::Punct(hash), Some(TokenTree::Group(attribute)))
                if hash.as_char() == '#'
                    && attribute.delimiter() == Delimiter::Bracket
                    && function.take_attribute(attribute.stream()) =>
            {
                tokens.next();
                continue;
            }
            (TokenTree::Ident(keyword), Some(TokenTree::Ident(name)))
                if keyword.to_string() == "fn" =>
            {
                function.name = Some(name.to_string());
            }
            (TokenTree::Group(body), _)
                if body.delimiter() == Delimiter::Brace && function.name.is_some() =>
            {
                guarded.push(std::mem::take(&mut function).guard(prefix, body));
                continue;
            }
            _ => {}
        }
        guarded.push(token);
    }
    guarded.into_iter().collect()
}

impl Function {
    /// Notes what an attribute says of the name or of the guard. Returns whether it is nobody
    /// else's.
    fn take_attribute(&mut self, attribute: TokenStream) -> bool {
        let mut tokens = attribute.into_iter();
        let name = tokens.next().map(|it| it.to_string()).unwrap_or_default();
        let argument = match tokens.next() {
            Some(TokenTree::Group(arguments)) => arguments.stream().into_iter().next(),
            _ => None,
        };
        match (name.as_str(), argument) {
            ("new", _) => self.python_name = Some("__new__".to_owned()),
            ("setter", Some(field)) => self.python_name = Some(format!("{field}=")),
            ("setter", None) => panic!("name the field of a setter"),
            ("by", Some(TokenTree::Ident(guard))) => {
                self.guard = Some(guard);
                return true;
            }
            _ => {}
        }
        false
    }

    /// The body, called by its guard.
    fn guard(self, prefix: &str, body: &Group) -> TokenTree {
        let name = self.python_name.or(self.name).expect("seen before the body");
        let name = TokenTree::from(Literal::string(&format!("{prefix}{name}")));
        let bar = || punct('|', Spacing::Alone);
        let (mut call, closure) = match self.guard {
            None => (
                path(&["crate", "guard", "enter"]),
                vec![bar(), bar(), TokenTree::Group(body.clone())],
            ),
            Some(guard) => (
                vec![ident("self"), punct('.', Spacing::Alone), guard.into()],
                vec![bar(), ident("this"), bar(), with_this(body)],
            ),
        };
        let comma = punct(',', Spacing::Alone);
        let arguments = [name, comma].into_iter().chain(closure);
        call.push(group(Delimiter::Parenthesis, arguments.collect()));
        group(Delimiter::Brace, call.into_iter().collect())
    }
}

/// A group of tokens in which `this` stands for `self`, which a closure can't be given.
fn with_this(body: &Group) -> TokenTree {
    let tokens = body.stream().into_iter().map(|token| match token {
        TokenTree::Ident(it) if it.to_string() == "self" => Ident::new("this", it.span()).into(),
        TokenTree::Group(inner) => with_this(&inner),
        other => other,
    });
    let mut renamed = Group::new(body.delimiter(), tokens.collect());
    renamed.set_span(body.span());
    renamed.into()
}

fn path(names: &[&str]) -> Vec<TokenTree> {
    let colons = || [punct(':', Spacing::Joint), punct(':', Spacing::Alone)];
    let mut path = vec![ident(names[0])];
    for name in &names[1..] {
        path.extend(colons());
        path.push(ident(name));
    }
    path
}

fn ident(name: &str) -> TokenTree {
    Ident::new(name, Span::call_site()).into()
}

fn punct(letter: char, spacing: Spacing) -> TokenTree {
    Punct::new(letter, spacing).into()
}

fn group(delimiter: Delimiter, tokens: TokenStream) -> TokenTree {
    Group::new(delimiter, tokens).into()
}
